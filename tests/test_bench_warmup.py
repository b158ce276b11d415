"""``dsa-compile bench warmup`` without a GPU: its cases, what it counts, and what its check refuses."""

import json

import pytest
import torch
from stopwatch import Cpu, bench

from dsa_compile.bench import cases, timing, warmup
from dsa_compile.bench.warmup import CASES, WarmupCase
from dsa_compile.lowering.teach import teach

SMALL = {"heads": 2, "rank": 8, "nope": 8, "rope": 4, "value": 8, "index_heads": 3, "index_dim": 16}
TINY = WarmupCase("tiny", 2, 24, **SMALL), WarmupCase("tiny-selected", 1, 24, topk=8, **SMALL)


def precise(*operands):
    """The kernels as the reference in float32, whose results are rounded once."""
    out, loss, grads = teach(*(x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in operands))
    return out.bfloat16(), loss, [grad.to(x.dtype) for grad, x in zip(grads, operands[6:9])]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(warmup, "CASES", TINY)
    monkeypatch.setattr(warmup, "teach_cuda", precise)
    monkeypatch.setattr(cases, "ROTATED", 2 * TINY[1].bytes)


def test_what_is_right_is_timed_with_its_tokens_and_memory(tiny, tmp_path):
    result = bench("warmup", "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "figures.json").read_text())["cases"]
    for row, case in zip(rows, TINY, strict=True):
        assert (row["us"], row["extra_mib"], row["tokens"]) == (12.5, 3.0, case.batch * 24)
        assert row["tflops"] == pytest.approx(case.flops / 12.5e-6 / 1e12)
        assert 0 < row["error"] < warmup.ALLOWED
    for word in (f"{48 / 12.5e-6:,.0f}", "tokens/s", "q.k TFLOP/s", "extra MiB"):
        assert word in result.stdout


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize(
    "spoil",
    [lambda x: x * 1.01, lambda x: x.index_fill(0, torch.tensor(0), 0) if x.dim() else x * 0, lambda x: x * torch.nan],
    ids=["scaled", "left out", "nan"],
)
def test_what_is_wrong_in_any_result_has_no_speed(tiny, place, spoil, monkeypatch, tmp_path):
    monkeypatch.setattr(
        Cpu, "bend", staticmethod(lambda *x: tuple(spoil(y) if i == place else y for i, y in enumerate(x)))
    )
    result = bench("warmup", "--case", "tiny", "--out", tmp_path / "figures.json")
    assert result.exit_code == 1
    (row,) = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert not row["right"]
    assert "us" not in row


def test_the_cases_are_the_designs():
    described = {c.name: (c.batch, c.tokens, c.topk, ", ".join(map(str, c.targets))) for c in CASES}
    assert described == {
        "v3-4k": (1, 4096, None, ">= 195 TFLOP/s, <= 6144 MiB extra"),
        "v3-4k-selected": (1, 4096, 2048, "<= 6144 MiB extra"),
    }
    case = CASES[0]
    pairs = sum(range(1, 4097))
    assert case.flops == 2 * pairs * (128 * (192 + 128) + 3 * 64 * 128) == 1_099_780_063_232
    assert case.score_flops == 2 * pairs * (128 * 192 + 64 * 128) == case.flops // 2
    assert case.sets * case.bytes >= cases.ROTATED
