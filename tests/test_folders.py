"""A folder is the old one or the new one, whatever happens in between."""

from pathlib import Path

import pytest

from dsa_compile.folders import whole_folder, writable


def write(folder, text):
    with whole_folder(folder) as part:
        (part / "file").write_text(text)


def test_the_new_takes_the_place_of_the_old_and_nothing_is_left(tmp_path):
    for text in ("first", "second"):
        write(tmp_path / "out", text)
        assert (tmp_path / "out" / "file").read_text() == text
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_leaves_the_old(failing, tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    rename, calls = Path.rename, []

    def broken(self, target):
        calls.append(self)
        if len(calls) == failing:
            raise OSError("broken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match="broken"):
        write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_process_left_is_brought_back_or_thrown_away(tmp_path):
    write(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    (tmp_path / ".out.part").mkdir()
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "out"):
        raise KeyboardInterrupt
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_where_nothing_can_be_made_is_known_beforehand(tmp_path):
    assert writable(tmp_path / "new" / "newer")
    assert not any(tmp_path.iterdir())
    assert not writable(Path("/proc/new"))
