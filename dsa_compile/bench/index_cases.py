"""Calls of the indexer: what ``bench indexer`` and ``bench select`` score."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsa_compile.bench.cases import Case, causal_tail
from dsa_compile.config import DEFAULT_INDEX_TOPK, DSAConfig
from dsa_compile.lowering.fp8_keys import quantise
from dsa_compile.lowering.select.reference import index_scores

BUDGET = DSAConfig().select_budget
SAMPLE = 32
"""Query rows that are compared with float64."""
FP8_ALLOWED = 1e-3
"""Of a row's largest score: Hopper adds fp8 products up in about 14 bits."""


class IndexInputs(NamedTuple):
    """See `reference.select`. ``values``: the keys in bf16, before they were rounded to fp8."""

    q: Tensor
    weights: Tensor
    keys: Tensor
    scales: Tensor | None
    visible: Tensor
    values: Tensor


@dataclass(frozen=True)
class IndexCase(Case):
    """Queries that are the last ``queries`` of ``batch`` sequences of ``keys`` tokens. ``fp8``: of the index keys."""

    batch: int
    queries: int
    keys: int
    heads: int = 64
    fp8: bool = True
    dim: int = 128
    topk: int = DEFAULT_INDEX_TOPK

    @property
    def rows(self) -> int:
        return self.batch * self.queries

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def scores(self) -> int:
        """Visible ones."""
        return self.batch * (self.queries * self.keys - self.queries * (self.queries - 1) // 2)

    @property
    def flops(self) -> int:
        return self.scores * self.heads * self.dim * 2

    @property
    def bytes(self) -> int:
        """Keys and their scales read once, scores written."""
        return self.batch * self.keys * (self.dim + 4 if self.fp8 else 2 * self.dim) + 4 * self.scores

    @property
    def fp8_products(self) -> bool:
        return self.fp8

    def inputs(self, device: torch.device, seed: int) -> IndexInputs:
        """Normal values, head weights of both signs in float32."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        B, T, S = self.batch, self.queries, self.keys
        q, values = normal(B, T, self.heads, self.dim), normal(B, S, self.dim)
        weights = normal(B, T, self.heads, dtype=torch.float32) * self.heads**-0.5
        keys, scales = quantise(values) if self.fp8 else (values, None)
        return IndexInputs(q, weights, keys, scales, causal_tail(B, T, S, device), values)

    def exact_scores(self, inputs: IndexInputs, row: int, *, rounded: bool = True) -> Tensor:
        """float64 scores of the slots that a query row sees; of what was there before any rounding to fp8, if not."""
        b, t = divmod(row, self.queries)
        end = self.keys - self.queries + t + 1
        keys, scales = (inputs.keys, inputs.scales) if rounded else (inputs.values, None)
        q, weights = (x[b, t, None, None] for x in (inputs.q, inputs.weights))
        scales = None if scales is None else scales[b, None, :end]
        return index_scores(q.double(), weights.double(), keys[b, None, :end], self.scale, scales)[0, 0]
