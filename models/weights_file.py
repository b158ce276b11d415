"""Safetensors files of checkpoints, opened with an error that names the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dsa_compile.errors import CheckpointError


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file: its tensors are read one by one, by name.

    Raises:
        CheckpointError: it cannot be read, now or later on.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read as a safetensors file ({error}).") from error
