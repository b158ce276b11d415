"""``dsa-compile bench select``: scores and top-k in one op."""

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
from dsa_compile.bench.selections import well_formed
from dsa_compile.bench.timing import Gpu, Recording

MIB = 1 << 20

CASES = (
    IndexCase("decode-b1-128k", 1, 1, 128 << 10, targets=(Target(26, "us"),)),
    IndexCase("decode-b8-32k", 8, 1, 32 << 10, targets=(Target(32, "us"),)),
    IndexCase("decode-b64-32k", 64, 1, 32 << 10, targets=(Target(115, "us"),)),
    IndexCase(
        "prefill-128k", 1, 4096, 128 << 10, targets=(Target(11800, "us"), Target(1.1 * BUDGET / MIB, "MiB extra"))
    ),
    IndexCase("chunk-1m", 1, 2048, 1 << 20),
)
"""DeepSeek-V3.2's indexer over keys in fp8."""


@dataclass(frozen=True)
class Verdict:
    """How good the chosen slots are.

    Attributes:
        error: how far a chosen slot lies below the K-th best score of its row, or a slot that is not chosen above it,
            relative to the largest score of the row. recall: of the selection without any rounding to fp8.
        ordered: every row names K distinct visible slots, ascending.
    """

    error: float
    recall: float
    ordered: bool

    @property
    def right(self) -> bool:
        return self.ordered and self.error <= FP8_ALLOWED


def checked(case: IndexCase, sets: Sequence[IndexInputs], outputs: Sequence[tuple[Tensor, ...]]) -> Verdict:
    """Compare rows that are spread over all launches with the selection by float64 scores.

    Sets of slots agree but where scores tie within what fp8 products are exact to.
    """
    selections = [written[0].flatten(0, 1) for written in outputs]
    ranges = [inputs.visible.flatten(0, 2) for inputs in sets]
    if not all(map(well_formed, selections, ranges)):
        return Verdict(float("nan"), float("nan"), ordered=False)
    errors, recalls = [], []
    for s, row in spread(len(sets), case.rows, SAMPLE):
        exact, unrounded = (case.exact_scores(sets[s], row, rounded=rounded) for rounded in (True, False))
        chosen = torch.zeros_like(exact, dtype=torch.bool).index_fill_(0, selections[s][row].long(), True)
        bar = exact.topk(case.topk).values[-1]
        errors.append(torch.maximum(bar - exact[chosen].min(), exact[~chosen].max() - bar) / exact.abs().max())
        recalls.append(chosen[unrounded.topk(case.topk).indices].double().mean())
    return Verdict(torch.stack(errors).max().item(), torch.stack(recalls).mean().item(), ordered=True)


def _record(case: IndexCase, sets: Sequence[IndexInputs], gpu: Gpu) -> tuple[Recording, dict[str, Any]]:
    def op(
        q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, visible: Tensor, values: Tensor
    ) -> tuple[Tensor]:
        picks = torch.ops.dsa.select(q, weights, keys, visible, None, case.topk, case.scale, BUDGET, None, scales)
        return (picks,)

    extra = gpu.extra_bytes(op, sets[0])
    return gpu.record(op, sets), {"extra_mib": extra / MIB}


COLUMNS = (
    table.CASE,
    table.TIME,
    table.SPREAD,
    table.TFLOPS,
    table.GBYTES,
    table.SHARE,
    table.figure("error", "error", ".1e"),
    table.figure("recall", "recall", ".4f"),
    table.figure("extra MiB", "extra_mib", ".1f"),
    table.TARGET,
)


def select(names: Sequence[str] | None = None, out: Path | None = None) -> dict[str, Any]:
    """Check, then time ``dsa::select`` over keys in fp8; see `harness.run`.

    Raises:
        ConfigError: a case is unknown, or there is no GPU that multiplies fp8 values.
    """
    bench = Bench(title="selection of tokens", cases=CASES, record=_record, check=checked, columns=COLUMNS)
    return run(bench, names, out)
