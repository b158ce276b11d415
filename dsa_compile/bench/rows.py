"""Rows of figures in a JSON file that several processes and several runs fill."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsa_compile.errors import ConfigError

Row = dict[str, Any]


class Rows:
    """What was measured so far.

    Args:
        path: a file that is there or will be. header: what all rows share, of which a file says the same.
        key: fields that tell rows apart.

    Raises:
        ConfigError: the file holds something else, or rows that share something else.
    """

    def __init__(self, path: Path, header: Row, key: Sequence[str]) -> None:
        self.path, self._header, self._key = path, header, key
        if path.exists():
            self._check()
        else:
            self._write([])

    def all(self) -> list[Row]:
        rows: list[Row] = json.loads(self.path.read_text())["rows"]
        return rows

    def lacks(self, row: Row) -> bool:
        """Whether there is none with the same key."""
        return self._place(row) not in map(self._place, self.all())

    def add(self, row: Row) -> None:
        """Nobody else may be adding one."""
        self._write([*self.all(), row])

    def _place(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._key)

    def _check(self) -> None:
        try:
            found = json.loads(self.path.read_text())
            shared = {name: value for name, value in found.items() if name != "rows"}
            [self._place(row) for row in found["rows"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--out: expected rows of {', '.join(self._key)}, came {self.path} ({error!r}). Give another file."
            ) from error
        if shared != self._header:
            raise ConfigError(
                f"--out: expected rows of {self._header}, came {self.path} with those of {shared}. Give another file."
            )

    def _write(self, rows: list[Row]) -> None:
        """At once, so that who is killed leaves what was there before."""
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_text(json.dumps({**self._header, "rows": rows}, indent=1) + "\n")
        os.replace(beside, self.path)
