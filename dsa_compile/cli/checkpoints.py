"""What is read of a checkpoint folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def load(checkpoint: Path, dtype: str, device: str) -> Any:
    """The causal language model in a checkpoint folder.

    Raises:
        CheckpointError: the folder is none. ConfigError: dtype or device is unknown.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from dsa_compile.errors import ConfigError

    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype: expected float32, bfloat16 or float16, came {dtype!r}.")
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device: cannot use {device!r} ({str(error).splitlines()[0]}).") from error
    with reading(checkpoint, "config.json"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype), local_files_only=True
        )
    return model.to(place)


def load_weightless(checkpoint: Path) -> Any:
    """The model that a checkpoint folder's config describes, in bfloat16 on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with reading(checkpoint, "config.json"):
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def load_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer in a checkpoint folder. Raises CheckpointError where there is none."""
    from transformers import AutoTokenizer

    with reading(checkpoint, "tokenizer_config.json"):
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


@contextmanager
def reading(checkpoint: Path, file: str) -> Iterator[None]:
    """Turn what transformers raises about a checkpoint folder, which must hold ``file``, into CheckpointError."""
    from transformers.utils import logging

    from dsa_compile.errors import CheckpointError

    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: expected a checkpoint folder, found none.")
    if not (checkpoint / file).is_file():
        raise CheckpointError(f"{checkpoint}: expected a checkpoint folder with {file}; it has none.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint}: cannot be loaded ({str(error).splitlines()[0]}).") from error
