"""``dsa-compile bench warmup``: one layer's share of a training step, its attention, targets, loss and gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsa_compile.bench import table
from dsa_compile.bench.cases import Case, Target, causal_tail
from dsa_compile.bench.harness import Bench, run
from dsa_compile.bench.index_cases import BUDGET
from dsa_compile.bench.table import Column, Row
from dsa_compile.bench.timing import Gpu, Recording
from dsa_compile.lowering.teach import teach, teach_cuda

MIB = 1 << 20
ALLOWED, LOSS_ALLOWED = 2**-8, 1e-3
"""Of the norm of float64's attention and gradients, twice what rounding to bfloat16 costs; and of its loss."""


class WarmupInputs(NamedTuple):
    """See `divergence.taught_attention`."""

    q: Tensor
    c_kv: Tensor
    k_pe: Tensor
    kv_b_weight: Tensor
    visible: Tensor
    topk_indices: Tensor | None
    index_q: Tensor
    index_weights: Tensor
    index_keys: Tensor


@dataclass(frozen=True)
class WarmupCase(Case):
    """A layer of DeepSeek-V3 and a new indexer over ``batch`` sequences, in bf16.

    ``topk``: attention is over what the indexer selects, as in the second stage; None: over everything.
    """

    batch: int
    tokens: int
    topk: int | None = None
    heads: int = 128
    rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    index_heads: int = 64
    index_dim: int = 128

    @property
    def pairs(self) -> int:
        """Queries and tokens that they see."""
        return self.batch * self.tokens * (self.tokens + 1) // 2

    @property
    def flops(self) -> int:
        """Of attention, and of the indexer's products and the two that their gradients take; nothing twice."""
        teacher = self.heads * (self.nope + self.rope + self.value)
        return 2 * self.pairs * (teacher + 3 * self.index_heads * self.index_dim)

    @property
    def score_flops(self) -> int:
        """Of queries and keys alone, attention's and the indexer's, each once."""
        return 2 * self.pairs * (self.heads * (self.nope + self.rope) + self.index_heads * self.index_dim)

    @property
    def bytes(self) -> int:
        """Operands read and results written once, weights in float32."""
        teacher = self.heads * (self.nope + self.rope + self.value) + self.rank + self.rope
        student = 2 * (self.index_heads + 1) * self.index_dim + 4 * self.index_heads
        return 2 * self.batch * self.tokens * (teacher + student)

    @property
    def scales(self) -> tuple[float, float]:
        """Of attention and of the index scores."""
        return (self.nope + self.rope) ** -0.5, self.index_dim**-0.5

    def arguments(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Of `teach`, for one set of inputs."""
        return *inputs, self.nope, *self.scales, True

    def inputs(self, device: torch.device, seed: int) -> WarmupInputs:
        """Normal values."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        B, T = self.batch, self.tokens
        q = normal(B, T, self.heads, self.nope + self.rope).transpose(1, 2)
        weight = normal(self.heads * (self.nope + self.value), self.rank) * self.rank**-0.5
        visible, index_q = causal_tail(B, T, T, device), normal(B, T, self.index_heads, self.index_dim)
        index_weights = normal(B, T, self.index_heads, dtype=torch.float32) * self.index_heads**-0.5
        student, topk = (index_q, index_weights, normal(B, T, self.index_dim)), None
        if self.topk is not None:
            topk = torch.ops.dsa.select(*student, visible, None, self.topk, self.scales[1], BUDGET)
        return WarmupInputs(q, normal(B, T, self.rank), normal(B, T, self.rope), weight, visible, topk, *student)


@dataclass(frozen=True)
class Verdict:
    """Errors relative to float64's norms.

    Attributes:
        error: of attention. loss_error: of the loss. grad_error: the largest of the gradients in index queries, head
            weights and index keys.
    """

    error: float
    loss_error: float
    grad_error: float

    @property
    def right(self) -> bool:
        return self.error <= ALLOWED and self.grad_error <= ALLOWED and self.loss_error <= LOSS_ALLOWED


def checked(case: WarmupCase, sets: Sequence[WarmupInputs], outputs: Sequence[tuple[Tensor, ...]]) -> Verdict:
    """Compare all that every launch wrote with float64."""
    errors = []
    for inputs, written in zip(sets, outputs, strict=True):
        exact = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
        out, loss, grads = teach(*case.arguments(exact))
        errors.append([((x - y).norm() / y.norm()).item() for x, y in zip(written, (out, loss, *grads), strict=True)])
    attention, loss_error, *grad_errors = (torch.tensor(each).max().item() for each in zip(*errors))
    return Verdict(attention, loss_error, torch.tensor(grad_errors).max().item())


def _record(case: WarmupCase, sets: Sequence[WarmupInputs], gpu: Gpu) -> tuple[Recording, dict[str, Any]]:
    def layer(*inputs: Any) -> tuple[Tensor, ...]:
        out, loss, grads = teach_cuda(*case.arguments(inputs))
        return out, loss, *grads

    extra = gpu.extra_bytes(layer, sets[0])
    figures = {"tokens": case.batch * case.tokens, "score_flops": case.score_flops, "extra_mib": extra / MIB}
    return gpu.record(layer, sets), figures


def _rate(title: str, count: str, unit: float, form: str) -> Column:
    """A count of a launch, in so many a second."""

    def cell(row: Row) -> str:
        return format(row[count] / row["us"] * 1e6 / unit, form) if "us" in row else ""

    return Column(title, cell)


CASES = (
    WarmupCase("v3-4k", 1, 4096, targets=(Target(195, "TFLOP/s"), Target(6 << 10, "MiB extra"))),
    WarmupCase("v3-4k-selected", 1, 4096, topk=2048, targets=(Target(6 << 10, "MiB extra"),)),
)
COLUMNS = (
    table.CASE,
    table.TIME,
    table.SPREAD,
    _rate("tokens/s", "tokens", 1, ",.0f"),
    table.TFLOPS,
    table.SHARE,
    _rate("q.k TFLOP/s", "score_flops", 1e12, ".0f"),
    table.figure("extra MiB", "extra_mib", ",.0f"),
    table.figure("error", "error", ".1e"),
    table.figure("of loss", "loss_error", ".1e"),
    table.figure("of gradients", "grad_error", ".1e"),
    table.TARGET,
)


def warmup(names: Sequence[str] | None = None, out: Path | None = None) -> dict[str, Any]:
    """Check, then time what a layer of DeepSeek-V3 adds to a step of `distillation.warmup`; see `harness.run`.

    Raises:
        ConfigError: a case is unknown, or there is no GPU.
    """
    bench = Bench(title="a layer's warm-up", cases=CASES, record=_record, check=checked, columns=COLUMNS)
    return run(bench, names, out)
