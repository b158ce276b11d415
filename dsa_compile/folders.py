"""Folders that appear whole or not at all, and where they can."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or in what of its path is there."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` to write into; it takes that one's place at the end, or vanishes on an error.

    A process that is killed leaves the old folder where it was, or in the instant between two renames as
    ``.NAME.old``, from where the next call brings it back.
    """
    folder = folder.absolute()
    part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
