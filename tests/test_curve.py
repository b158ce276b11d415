"""The curve of a search is drawn where matplotlib is there, and asked for where it is not."""

import pytest

from dsa_compile import curve
from dsa_compile.errors import ConfigError
from dsa_compile.search import PlanSearch, Point

FOUND = PlanSearch(
    subject={"index_topk": 8}, dense=1.0, own=1.1, curve=(Point(1.0, "share:FF", 1.1), Point(0.5, "share:FS", 1.3))
)


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curve.draw(FOUND, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(curve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dsa_compile\[plot\]'"):
        curve.draw(FOUND, tmp_path / "curve.png")
