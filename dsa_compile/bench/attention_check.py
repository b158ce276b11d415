"""Whether what the launches of a case write is right: float64 is the measuring stick, eager bf16 the bound."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.bench.attention_cases import SCALE, AttentionCase, Inputs
from dsa_compile.bench.cases import spread
from dsa_compile.lowering.fp8_rows import unpack
from dsa_compile.lowering.sparse_mla.reference import sparse_mla

SAMPLE = 32
"""Query rows that are compared with float64."""
ALLOWED = 1.1
"""Times the error of eager code."""


@dataclass(frozen=True)
class Verdict:
    """Errors of out, relative to the norm of float64's.

    Attributes:
        eager_error: of eager code on the same rows. lse_right: the log-sum-exp is float64's.
        whole: every value of every output was written, and none is NaN.
    """

    error: float
    eager_error: float
    lse_right: bool
    whole: bool

    @property
    def right(self) -> bool:
        return self.whole and self.lse_right and self.error <= ALLOWED * self.eager_error


def checked(case: AttentionCase, sets: Sequence[Inputs], outputs: Sequence[tuple[Tensor, ...]]) -> Verdict:
    """Compare rows that are spread over all launches with float64.

    A peer's launches write out alone: then there is no lse to be compared.
    """
    places = spread(len(sets), case.rows, SAMPLE)
    q, q_pe, latent = (torch.stack(parts) for parts in zip(*(_row(case, sets[s], row) for s, row in places)))
    out, *lse = (
        torch.stack([written[s].flatten(0, 1)[row] for s, row in places]).unsqueeze(1).double()
        for written in zip(*outputs)
    )
    exact, exact_lse = sparse_mla(q.double(), q_pe.double(), latent.double(), None, None, None, SCALE)
    error, eager_error = (((x - exact).norm() / exact.norm()).item() for x in (out, _eager(q, q_pe, latent).double()))
    lse_right = all(bool(((x - exact_lse).abs() <= 2e-5 + 1e-6 * exact_lse.abs()).all()) for x in lse)
    whole = not any(bool(x.isnan().any()) for written in outputs for x in written)
    return Verdict(error, eager_error, lse_right, whole)


def _row(case: AttentionCase, inputs: Inputs, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, H, R], q_pe [1, H, P] and the selected latent rows [K, R+P] of one query row, as values in bf16."""
    q, q_pe, pool, _, picks = inputs
    b, t = divmod(row, case.queries)
    latent = pool[b, picks[b, t].long()]
    return q[b, t, None], q_pe[b, t, None], unpack(latent, case.rank, case.rope, q.dtype) if case.fp8 else latent


def _eager(q: Tensor, q_pe: Tensor, latent: Tensor) -> Tensor:
    """The same attention as everyday torch code in the inputs' own dtype."""
    logits = torch.einsum("bthd,bkd->bthk", torch.cat([q, q_pe], -1), latent) * SCALE
    return torch.einsum("bthk,bkr->bthr", logits.softmax(-1), latent[..., : q.shape[-1]])
