"""``dsa-compile bench select`` without a GPU: its cases, and what its check allows and refuses."""

import json

import pytest
import torch
from stopwatch import Cpu, bench

from dsa_compile.bench import cases, select, timing
from dsa_compile.bench.cases import Target
from dsa_compile.bench.index_cases import FP8_ALLOWED, IndexCase
from dsa_compile.bench.select import CASES, checked
from dsa_compile.bench.selections import well_formed

SMALL = {"heads": 4, "dim": 16, "topk": 8}
TINY = (
    IndexCase("prefill-tiny", 1, 20, 40, targets=(Target(15, "us"), Target(2, "MiB extra")), **SMALL),
    IndexCase("decode-tiny", 3, 2, 50, targets=(Target(3, "MiB extra"),), **SMALL),
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(select, "CASES", TINY)
    monkeypatch.setattr(cases, "ROTATED", 3 * min(case.bytes for case in TINY))


def test_what_is_right_is_timed_with_its_memory_and_recall(tiny, tmp_path):
    result = bench("select", "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "figures.json").read_text())["cases"]
    for row, case in zip(rows, TINY, strict=True):
        assert (row["us"], row["extra_mib"], row["error"]) == (12.5, 3.0, 0.0)
        assert row["tflops"] == pytest.approx(case.flops / 12.5e-6 / 1e12)
        assert 0.6 < row["recall"] < 1
    assert [row["met"] for row in rows] == [False, True]
    for word in ("<= 15 us, <= 2 MiB extra, missed", "extra MiB", f"{rows[0]['recall']:.4f}"):
        assert word in result.stdout


@pytest.mark.parametrize(
    "bend",
    [
        lambda picks: picks.flip(-1),
        lambda picks: picks.index_fill(-1, torch.tensor(7), -1),
        lambda picks: torch.cat([picks[..., :1], picks[..., :-1]], -1),
        lambda picks: torch.arange(8, dtype=torch.int32).expand_as(picks).clone(),
        lambda picks: torch.where(picks == picks[..., -1:], 50, picks),
        lambda picks: torch.where(picks == picks[..., -1:], -(2**31), picks),
    ],
    ids=["permuted", "missing", "repeated", "the first", "unseen", "not written"],
)
def test_wrong_selections_have_no_speed(tiny, bend, monkeypatch, tmp_path):
    monkeypatch.setattr(Cpu, "bend", staticmethod(lambda picks: (bend(picks),)))
    result = bench("select", "--out", tmp_path / "figures.json")
    assert result.exit_code == 1
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["wrong"] == [case.name for case in TINY]
    assert not any("us" in row or row["met"] for row in figures["cases"])


@pytest.mark.parametrize("gap", [0.5, 2.0])
def test_slots_may_change_places_within_what_fp8_is_exact_to(gap, monkeypatch):
    """The K-th best and the next, whose scores lie ``gap`` times the allowed error apart."""
    case = IndexCase("", 1, 1, 12, **SMALL)
    inputs = case.inputs(Cpu.device, 0)
    exact = torch.linspace(0.5, 1.0, 12, dtype=torch.float64).flip(0)
    exact[8] = exact[7] - gap * FP8_ALLOWED
    monkeypatch.setattr(IndexCase, "exact_scores", lambda *_, rounded=True: exact)
    for picks, right in (
        (range(8), True),
        ((0, 1, 2, 3, 4, 5, 6, 8), gap < 1),
        ((0, 1, 2, 3, 4, 5, 6, 9), False),  # a worse one is chosen
        ((1, 2, 3, 4, 5, 6, 7, 8), False),  # a better one is missing
    ):
        verdict = checked(case, [inputs], [(torch.tensor([[[*picks]]]).int(),)])
        assert verdict.right is right
        assert verdict.recall == (1 if picks == range(8) else 7 / 8)


def test_a_selection_from_other_keys_is_wrong(tiny):
    case = TINY[0]
    sets = [case.inputs(Cpu.device, seed) for seed in range(2)]
    outputs = select._record(case, sets, Cpu())[0].rewritten()
    assert checked(case, sets, outputs).right
    assert not checked(case, sets, outputs[::-1]).right


@pytest.mark.parametrize(
    ("picks", "right"),
    [
        ([3, 4, 6], True),
        ([3, 5, 7], True),
        ([3, 4, 4], False),
        ([4, 3, 6], False),
        ([2, 4, 6], False),
        ([3, 4, 8], False),
        ([3, 4, -1], False),
        ([-1, 3, 4], False),
    ],
)
def test_selections_are_ascending_distinct_visible_and_full(picks, right):
    assert well_formed(torch.tensor([picks]), torch.tensor([[3, 8]])) is right


def test_short_rows_end_in_minus_one():
    visible = torch.tensor([[5, 7], [0, 0]])
    assert well_formed(torch.tensor([[5, 6, -1], [-1, -1, -1]]), visible)
    for rows in ([[5, 6, 6], [-1, -1, -1]], [[5, -1, -1], [-1, -1, -1]], [[5, 6, -1], [0, -1, -1]]):
        assert not well_formed(torch.tensor(rows), visible)


def test_the_cases_are_the_designs():
    k = 1024
    assert {c.name: (c.batch, c.queries, c.keys, ", ".join(map(str, c.targets))) for c in CASES} == {
        "decode-b1-128k": (1, 1, 128 * k, "<= 26 us"),
        "decode-b8-32k": (8, 1, 32 * k, "<= 32 us"),
        "decode-b64-32k": (64, 1, 32 * k, "<= 115 us"),
        "prefill-128k": (1, 4096, 128 * k, "<= 11800 us, <= 281.6 MiB extra"),
        "chunk-1m": (1, 2048, 1024 * k, ""),
    }
    for case in CASES:
        assert (case.heads, case.dim, case.topk, case.fp8) == (64, 128, 2048, True)
        assert case.keys - case.queries + 1 > case.topk
