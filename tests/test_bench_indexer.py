"""``dsa-compile bench indexer`` without a GPU: its cases, the launches that it makes, what its check refuses."""

import json

import hopper
import pytest
import torch
from stopwatch import Cpu, bench

from dsa_compile.bench import cases, index_cases, indexer, timing
from dsa_compile.bench.index_cases import IndexCase
from dsa_compile.bench.indexer import CASES, checked
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.rows import kept, topk_slots
from dsa_compile.lowering.select.reference import index_scores, select

SMALL = {"heads": 4, "dim": 16, "topk": 8}
TINY = (
    IndexCase("prefill-tiny", 2, 21, 60, **SMALL),
    IndexCase("decode-tiny-bf16", 3, 1, 50, fp8=False, **SMALL),
)
NAN = float("nan")


class Kernel:
    """The score kernel as the reference. ``bend``: what becomes of the scores of some rows; keeps the launches."""

    def __init__(self, bend):
        self.bend = bend
        self.launches = []

    def __call__(self, scores, q, weights, keys, ranges, topk, scale, table, scales, *, first_row, blocks, **options):
        assert table is None
        exact = index_scores(q, weights, keys, scale, scales).flatten(0, 1)[first_row:][: len(scores)]
        slots = torch.arange(keys.shape[1])
        start, end = (x[first_row:][: len(scores), None] for x in ranges.unbind(-1))
        scores.copy_(torch.where((slots >= start) & (slots < end) & (end - start > topk), exact, scores))
        self.bend(scores)
        self.launches.append((first_row, len(scores), blocks, options))


@pytest.fixture
def kernel(monkeypatch):
    """The command on a pretended Hopper GPU, over `TINY` in three sets each, a few rows a launch.

    As in a replay, what a launch does not write is NaN.
    """

    def put(bend=lambda scores: None):
        made = Kernel(bend)
        monkeypatch.setattr(indexer.launch, "score", made)
        return made

    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(Device, "of", lambda device: Device((9, 0), 132, hopper.SHARED))
    monkeypatch.setattr(indexer, "CASES", TINY)
    monkeypatch.setattr(indexer, "BUDGET", 16 * 4 * 60)
    monkeypatch.setattr(cases, "ROTATED", 3 * min(case.bytes for case in TINY))
    torch.use_deterministic_algorithms(True)  # fills new memory
    yield put
    torch.use_deterministic_algorithms(False)


def test_what_is_right_is_timed_as_select_launches_it(kernel, tmp_path):
    launches = kernel().launches
    result = bench("indexer", "--case", "prefill-tiny", "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "figures.json").read_text())["cases"]
    case = TINY[0]
    assert row["tflops"] == pytest.approx(case.flops / 12.5e-6 / 1e12)
    assert row["share"] == pytest.approx(max(row["tflops"] / 1600, row["gbytes"] / 4000))
    assert row["error"] < row["allowed"] == 1e-3
    rows = [(first, count) for first, count, _, _ in launches[: len(launches) // (2 * case.sets)]]
    assert [first for first, _ in rows] == [sum(n for _, n in rows[:i]) for i in range(len(rows))]
    assert sum(n for _, n in rows) == 42
    assert len(rows) > 2
    assert all(count <= 16 for _, count in rows)
    options = launches[0][3]
    config = indexer.configs.config(indexer.launch.call_of(*case.inputs(Cpu.device, 0)[:3:2], None, None), Device.of(0))
    assert options["constants"]["BLOCK_N"] == config.keys
    shape = f"{config.columns} x {config.keys}, {config.warps} warps, {config.stages} stages"
    assert row["configuration"] == f"{shape}, {options['splits']} splits"


@pytest.mark.parametrize("name", [case.name for case in TINY])
@pytest.mark.parametrize(
    "bend",
    [
        lambda scores: scores[-1].mul_(1.002),
        lambda scores: scores[:, 5].add_(0.1),
        lambda scores: scores.copy_(scores.roll(1, -1)),
        lambda scores: scores[0].fill_(NAN),
        lambda scores: scores.fill_(NAN),
        lambda scores: scores[:, :2].copy_(scores[:, :2].flip(-1)),
    ],
    ids=["one row scaled", "one slot", "shifted", "a row left out", "nothing written", "two slots exchanged"],
)
def test_wrong_scores_have_no_speed(kernel, bend, name, tmp_path):
    kernel(bend)
    result = bench("indexer", "--case", name, "--out", tmp_path / "figures.json")
    assert result.exit_code == 1
    (row,) = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert not row["right"]
    assert "us" not in row


def test_a_slot_that_nobody_sees_is_not_to_be_written(kernel, tmp_path):
    kernel(lambda scores: scores[0, -1].fill_(0.0))
    assert bench("indexer", "--case", "prefill-tiny", "--out", tmp_path / "figures.json").exit_code == 1
    (row,) = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert row["error"] < row["allowed"]
    assert not row["whole"]


@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_allowed_tells_float32_sums_from_weights_in_bf16(fp8):
    case = IndexCase("", 1, 8, 4096, fp8=fp8)
    q, weights, keys, scales, visible, _ = inputs = case.inputs(Cpu.device, 0)
    hidden = ~kept(visible, None, slice(None), case.keys, q)[0]
    float32, rounded = (
        checked(case, [inputs], [(index_scores(q, w, keys, case.scale, scales)[0].masked_fill(hidden, NAN),)])
        for w in (weights, weights.bfloat16())
    )
    assert float32.right
    assert float32.error < 0.1 * float32.allowed
    assert rounded.whole
    assert not rounded.right


def test_the_cases_are_the_designs():
    shapes = {c.name: (c.batch, c.queries, c.keys, c.heads, c.fp8, "".join(map(str, c.targets))) for c in CASES}
    k = 1024
    assert shapes == {
        "prefill-8k": (1, 4096, 8 * k, 64, True, ">= 850 TFLOP/s"),
        "prefill-128k": (1, 4096, 128 * k, 64, True, ">= 800 TFLOP/s"),
        "decode-b1-32k": (1, 1, 32 * k, 64, True, "<= 4.5 us"),
        "decode-b1-128k": (1, 1, 128 * k, 64, True, "<= 8 us"),
        "decode-b8-32k": (8, 1, 32 * k, 64, True, ""),
        "decode-b64-32k": (64, 1, 32 * k, 64, True, ""),
        "decode-b128-32k": (128, 1, 32 * k, 64, True, "<= 158 us"),
        "decode-b64-32k-t2": (64, 2, 32 * k, 64, True, ""),
        "bf16-prefill-8k": (1, 4096, 8 * k, 64, False, ">= 500 TFLOP/s"),
        "bf16-decode-b64-32k": (64, 1, 32 * k, 64, False, ""),
        "glm-prefill-8k": (1, 4096, 8 * k, 32, True, ""),
    }
    for case in CASES:
        assert (case.dim, case.topk) == (128, 2048)
        assert case.keys - case.queries + 1 > case.topk  # else a row needs no score
        assert case.sets * case.bytes >= cases.ROTATED
    assert index_cases.BUDGET == 256 << 20


def test_flops_and_bytes_of_a_case_by_hand():
    case = CASES[0]
    scores = sum(range(4097, 8193))
    assert case.flops == scores * 64 * 128 * 2 == 412_350_414_848
    assert case.bytes == 8192 * 132 + scores * 4
    assert next(c for c in CASES if c.name == "bf16-decode-b64-32k").bytes == 64 * 32768 * (256 + 4)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_inputs_are_what_select_takes_and_exact_scores_are_its(case):
    inputs = case.inputs(Cpu.device, 3)
    assert inputs.q.dtype == inputs.values.dtype == torch.bfloat16
    assert (inputs.weights < 0).any()
    assert (inputs.weights > 0).any()
    q, weights = inputs.q.double(), inputs.weights.double()
    picks = select(q, weights, inputs.keys, inputs.visible, None, 8, case.scale, 1 << 20, None, inputs.scales)
    for row in range(case.rows):
        exact = case.exact_scores(inputs, row)
        best = topk_slots(exact[None, None], torch.ones(1, 1, len(exact), dtype=torch.bool), 8)[0, 0]
        assert torch.equal(best, picks.flatten(0, 1)[row])
        unrounded = case.exact_scores(inputs, row, rounded=False)
        assert torch.equal(exact, unrounded) is not case.fp8
