"""``dsa-compile bench indexer``: the scores of the lightning indexer, by themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsa_compile.bench import table
from dsa_compile.bench.cases import Target, spread
from dsa_compile.bench.harness import Bench, run
from dsa_compile.bench.index_cases import BUDGET, FP8_ALLOWED, SAMPLE, IndexCase, IndexInputs
from dsa_compile.bench.timing import Gpu, Recording
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.rows import kept
from dsa_compile.lowering.select import configs, launch

ALLOWED = 1e-5
"""Of a row's largest score, in bf16: sums of exact products in float32 err by 1e-6 at most, in 14 bits by 3e-4."""

CASES = (
    IndexCase("prefill-8k", 1, 4096, 8 << 10, targets=(Target(850, "TFLOP/s"),)),
    IndexCase("prefill-128k", 1, 4096, 128 << 10, targets=(Target(800, "TFLOP/s"),)),
    IndexCase("decode-b1-32k", 1, 1, 32 << 10, targets=(Target(4.5, "us"),)),
    IndexCase("decode-b1-128k", 1, 1, 128 << 10, targets=(Target(8, "us"),)),
    IndexCase("decode-b8-32k", 8, 1, 32 << 10),
    IndexCase("decode-b64-32k", 64, 1, 32 << 10),
    IndexCase("decode-b128-32k", 128, 1, 32 << 10, targets=(Target(158, "us"),)),
    IndexCase("decode-b64-32k-t2", 64, 2, 32 << 10),
    IndexCase("bf16-prefill-8k", 1, 4096, 8 << 10, fp8=False, targets=(Target(500, "TFLOP/s"),)),
    IndexCase("bf16-decode-b64-32k", 64, 1, 32 << 10, fp8=False),
    IndexCase("glm-prefill-8k", 1, 4096, 8 << 10, heads=32),
)
"""DeepSeek-V3.2's indexer, 64 heads of 128, and GLM-5's with half as many."""


@dataclass(frozen=True)
class Verdict:
    """How near the scores are.

    Attributes:
        error: the largest, relative to the largest score of its row.
        whole: every visible slot was written, and no other.
    """

    error: float
    allowed: float
    whole: bool

    @property
    def right(self) -> bool:
        return self.whole and self.error <= self.allowed


def checked(case: IndexCase, sets: Sequence[IndexInputs], outputs: Sequence[tuple[Tensor, ...]]) -> Verdict:
    """Compare rows that are spread over all launches with float64."""
    errors = []
    for s, row in spread(len(sets), case.rows, SAMPLE):
        exact = case.exact_scores(sets[s], row)
        errors.append((outputs[s][0][row, : len(exact)] - exact).abs().max() / exact.abs().max())
    whole = all(
        torch.equal(scores.isnan(), ~kept(inputs.visible, None, slice(None), case.keys, scores).flatten(0, 1))
        for inputs, (scores,) in zip(sets, outputs)
    )
    return Verdict(torch.stack(errors).max().item(), FP8_ALLOWED if case.fp8 else ALLOWED, whole)


def _record(case: IndexCase, sets: Sequence[IndexInputs], gpu: Gpu) -> tuple[Recording, dict[str, Any]]:
    """As ``dsa::select`` scores: a launch writes as many rows as the budget holds."""
    call, device = launch.call_of(sets[0].q, sets[0].keys, None, None), Device.of(sets[0].q.device)
    config, launches = configs.config(call, device), list(launch.launches(call, device, BUDGET // (4 * case.keys)))
    splits = launches[0][1]["splits"]

    def scores(
        q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, visible: Tensor, values: Tensor
    ) -> tuple[Tensor]:
        out, ranges = q.new_empty(case.rows, case.keys, dtype=torch.float32), visible.view(-1, 2)
        for rows, options in launches:
            launch.score(out[rows], q, weights, keys, ranges, case.topk, case.scale, None, scales, **options)
        return (out,)

    picked = table.described(config.columns, config.keys, config.warps, config.stages, splits)
    return gpu.record(scores, sets), {"configuration": picked}


COLUMNS = (
    table.CASE,
    table.TIME,
    table.SPREAD,
    table.TFLOPS,
    table.GBYTES,
    table.SHARE,
    table.figure("error", "error", ".1e"),
    table.figure("allowed", "allowed", ".0e"),
    table.TARGET,
    table.CONFIGURATION,
)


def indexer(names: Sequence[str] | None = None, out: Path | None = None) -> dict[str, Any]:
    """Check, then time the score kernel of ``dsa::select``; see `harness.run`.

    Raises:
        ConfigError: a case is unknown, or there is no GPU that multiplies fp8 values where a case asks for it.
    """
    bench = Bench(title="index scores", cases=CASES, record=_record, check=checked, columns=COLUMNS)
    return run(bench, names, out)
