"""A record says what it is of, and is whole or absent."""

from pathlib import Path

import pytest

from dsa_compile.errors import ConfigError
from dsa_compile.record import read_record, write_record

SUBJECT = {"weights": "abc", "plan": ["own", "from:0"]}


def test_what_was_written_is_read(tmp_path):
    write_record(tmp_path / "a.json", "losses", SUBJECT, {"loss": 0.1 + 0.2})
    assert read_record(tmp_path / "a.json", "losses", SUBJECT)["loss"] == 0.1 + 0.2
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_record(path, "losses", SUBJECT, {"loss": 1})
    write_text = Path.write_text

    def half(self, text):
        write_text(self, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        write_record(path, "losses", SUBJECT, {"loss": 2})
    assert read_record(path, "losses", SUBJECT)["loss"] == 1


@pytest.mark.parametrize(
    ("kind", "subject", "words"),
    [
        ("losses", SUBJECT | {"plan": ["own", "own"]}, r"plan: expected \['own', 'own'\], came \['own', 'from:0'\]"),
        ("losses", SUBJECT | {"index_topk": 8}, "index_topk: expected 8, came None"),
        ("evaluation", SUBJECT, "expected a record of kind 'evaluation'"),
    ],
)
def test_a_record_of_something_else_is_named(kind, subject, words, tmp_path):
    write_record(tmp_path / "a.json", "losses", SUBJECT, {})
    with pytest.raises(ConfigError, match=words):
        read_record(tmp_path / "a.json", kind, subject)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '"kind"', '{"kind": "losses"}'])
def test_what_is_no_record_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=r"a\.json: (cannot be read as JSON|expected a record)"):
        read_record(tmp_path / "a.json", "losses", SUBJECT)
