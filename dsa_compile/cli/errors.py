"""What a user can mend, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print what a user can mend in one line and exit with 2."""
    from dsa_compile.errors import DSAError

    try:
        yield
    except DSAError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None


def check_out(out: Path | None, option: str = "--out") -> None:
    """Refuse a file that cannot be written, before hours are spent on what it is to hold."""
    from dsa_compile.errors import ConfigError
    from dsa_compile.folders import writable

    if out is not None and (out.is_dir() or not out.parent.is_dir() or not writable(out.parent)):
        raise ConfigError(f"{option}: expected a file in a folder that exists and can be written to, came {out}.")


def make_folder(path: Path, option: str = "--out") -> Path:
    """``path``, made if it is not there, or ConfigError."""
    from dsa_compile.errors import ConfigError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: expected a folder, or a place for one, came {path} ({error}).") from error
    return path
