"""Records of measurements: JSON files that say what they are of, and are written whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa_compile.errors import ConfigError


def write_record(path: Path, kind: str, subject: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Put ``figures`` on ``subject`` into ``path``; whoever is interrupted leaves what was there."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps({"kind": kind, "of": subject, **figures}, indent=1) + "\n")
    part.replace(path)


def read_record(path: Path, kind: str, subject: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that `write_record` put into ``path``.

    Raises:
        ConfigError: the file is no record of this ``kind``, or is of another ``subject``, naming what differs.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}).") from error
    if not isinstance(record, dict) or record.get("kind") != kind or not isinstance(record.get("of"), dict):
        raise ConfigError(f"{path}: expected a record of kind {kind!r}, came something else.")
    apart = {name: record["of"].get(name) for name in subject if record["of"].get(name) != subject[name]}
    if apart:
        differences = "; ".join(f"{name}: expected {subject[name]!r}, came {value!r}" for name, value in apart.items())
        raise ConfigError(f"{path}: {kind} of something else: {differences}. Measure again, or name another file.")
    return record
