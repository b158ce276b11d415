"""``dsa-compile bench topk`` without a GPU: its cases, what its check refuses, and its peers."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from stopwatch import Cpu, bench

from dsa_compile.bench import cases, timing, topk
from dsa_compile.bench.cases import Target
from dsa_compile.bench.topk import CASES, TopkCase, checked
from dsa_compile.lowering.rows import topk_slots

TINY = TopkCase("3x40", 3, 40, topk=8, targets=(Target(15, "us"), Target(2, "x torch.topk")))
TIED = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0]), torch.tensor([[0, 6]]).int()
"""Of three, slots 1 and 3 and the lowest of those that tie: 2."""


def exact(scores, visible, index_topk, out):
    slots = torch.arange(scores.shape[1])
    keep = (slots >= visible[:, :1]) & (slots < visible[:, 1:])
    out.copy_(topk_slots(scores[None], keep[None], index_topk)[0])


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(topk, "CASES", (TINY,))
    monkeypatch.setattr(topk, "kernel", exact)
    monkeypatch.setattr(topk, "MOST_SETS", 3)
    monkeypatch.setattr(cases, "ROTATED", 5 * TINY.bytes)


def test_what_is_right_is_timed_beside_torch(tiny, tmp_path):
    result = bench("topk", "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    ours, peer = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert (ours["us"], ours["wrong"], ours["compared"], ours["ordered"]) == (12.5, 0, 9, True)
    assert ours["gbytes"] == pytest.approx(3 * (40 + 8) * 4 / 12.5e-6 / 1e9)
    assert (peer["peer"], peer["right"], peer["speedup"]) == ("torch.topk", True, 1.0)
    assert not ours["met"]
    assert "<= 15 us, >= 2 x torch.topk, missed" in result.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        lambda picks: picks.flip(-1),
        lambda picks: picks.index_fill(-1, torch.tensor(7), -1),
        lambda picks: torch.where(picks == picks.amax(), picks + 1, picks),
        lambda picks: torch.cat([picks[:, :1], picks[:, :-1]], -1),
        lambda picks: picks.roll(1, 0),
    ],
    ids=["permuted", "missing", "another", "repeated", "of another row"],
)
def test_one_wrong_row_is_wrong(tiny, wrong, monkeypatch, tmp_path):
    def kernel(scores, visible, index_topk, out):
        exact(scores, visible, index_topk, out)
        out.copy_(wrong(out))

    monkeypatch.setattr(topk, "kernel", kernel)
    result = bench("topk", "--out", tmp_path / "figures.json")
    assert result.exit_code == 1
    ours, peer = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert not ours["right"]
    assert "us" not in ours
    assert peer["right"]
    assert "speedup" not in peer


@pytest.mark.parametrize(
    ("picks", "ours", "peers"),
    [
        ([1, 2, 3], True, True),
        ([3, 1, 2], False, True),
        ([1, 3, 4], False, True),
        ([5, 3, 1], False, True),
        ([0, 1, 3], False, False),
        ([1, 1, 3], False, False),
        ([1, 3, 6], False, False),
        ([1, 3, -1], False, False),
    ],
)
def test_ties_go_to_the_lower_slot_in_ours_and_anywhere_in_peers(picks, ours, peers):
    case, sets = TopkCase("1x6", 1, 6, topk=3), [(TIED[0][None], TIED[1])]
    outputs = [(torch.tensor([picks]),)]
    assert checked(case, sets, outputs).right is ours
    assert checked(case, sets, outputs, any_tie=True).right is peers


def test_flashinfer_is_timed_where_it_is_installed(tiny, monkeypatch, tmp_path):
    peer = ModuleType("flashinfer")
    peer.__spec__ = ModuleSpec("flashinfer", None)
    peer.top_k = lambda scores, k: tuple(torch.topk(scores, k))
    monkeypatch.setitem(sys.modules, "flashinfer", peer)
    assert bench("topk", "--out", tmp_path / "figures.json").exit_code == 0
    rows = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert [(row["peer"], row["right"]) for row in rows] == [(None, True), ("torch.topk", True), ("flashinfer", True)]


def test_the_cases_are_the_designs():
    assert {case.name: ", ".join(map(str, case.targets)) for case in CASES} == {
        "1x131072": "<= 16 us, >= 2 x torch.topk",
        "1x1048576": ">= 2 x torch.topk",
        "64x131072": "<= 45 us, >= 2 x torch.topk",
        "4096x8192": ">= 2 x torch.topk",
        "4096x32768": "<= 380 us, >= 2 x torch.topk",
        "4096x131072": "<= 1200 us, >= 2 x torch.topk",
        "4096x131072-narrow": "<= 1800 us, >= 2 x torch.topk",
    }
    assert all(case.name.startswith(f"{case.queries}x{case.keys}") and case.topk == 2048 for case in CASES)
    sets = {case.name: case.sets for case in CASES}
    assert sets == {
        **{"1x131072": 32, "1x1048576": 32, "64x131072": 16, "4096x8192": 4},
        **{"4096x32768": 1, "4096x131072": 1, "4096x131072-narrow": 1},
    }


def test_narrow_scores_tie_and_wide_ones_do_not():
    narrow, wide = (TopkCase("", 2, 4096, narrow).inputs(Cpu.device, 0)[0] for narrow in (True, False))
    assert narrow.dtype == wide.dtype == torch.float32
    assert 99.99 < narrow.min() < narrow.max() < 100.01
    assert len(narrow.unique()) < 1200
    assert len(wide.unique()) > 8000
