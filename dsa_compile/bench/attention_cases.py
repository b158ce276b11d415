"""The calls of ``dsa::sparse_mla`` that are timed, and the speeds that its kernels are held to on an H200."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.bench.cases import Case, Target, causal_tail
from dsa_compile.lowering.fp8_rows import pack, row_bytes

SCALE = 1.0
"""Softmax scale; random queries are scaled to give scores of about one."""
CONTEXT = 32 << 10
"""Slots of a sequence in decoding."""
PICKED_AT_ONCE = 64 << 20
"""Random numbers that drawing a selection holds at once."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q_absorbed, q_pe, latent, visible and topk_indices of one call; see `reference.sparse_mla`."""


@dataclass(frozen=True)
class AttentionCase(Case):
    """Queries that are the last ``queries`` of ``batch`` sequences of ``keys`` tokens, in bf16.

    ``fp8``: latent rows are bytes.
    """

    batch: int
    queries: int
    heads: int
    keys: int
    fp8: bool = False
    rank: int = 512
    rope: int = 64
    topk: int = 2048

    @property
    def rows(self) -> int:
        return self.batch * self.queries

    @property
    def flops(self) -> int:
        """Of both products, over every selected slot."""
        return self.rows * self.topk * self.heads * 2 * (2 * self.rank + self.rope)

    @property
    def bytes(self) -> int:
        """That must move: the selected latent rows once for each query row, q, out and indices."""
        width = row_bytes(self.rank, self.rope) if self.fp8 else 2 * (self.rank + self.rope)
        return self.rows * (self.topk * (width + 4) + self.heads * 2 * (2 * self.rank + self.rope))

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        """Normal values; random distinct ascending indices among the slots that a query sees."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device) * scale

        B, T, H, S = self.batch, self.queries, self.heads, self.keys
        q, q_pe = normal(B, T, H, self.rank, scale=self.rank**-0.5), normal(B, T, H, self.rope, scale=self.rope**-0.5)
        if self.fp8:
            pool = torch.empty(B, S, row_bytes(self.rank, self.rope), dtype=torch.uint8, device=device)
            for sequence in pool:
                sequence.copy_(pack(normal(S, self.rank), normal(S, self.rope)))
        else:
            pool = normal(B, S, self.rank + self.rope)
        visible = causal_tail(B, T, S, device)
        ends = visible[..., 1].flatten()
        picks = torch.cat([self._picks(part, generator) for part in ends.split(max(1, PICKED_AT_ONCE // S))])
        return q, q_pe, pool, visible, picks.view(B, T, self.topk)

    def _picks(self, ends: Tensor, generator: torch.Generator) -> Tensor:
        """int32[n, K] for rows that see the slots below ``ends`` [n]."""
        order = torch.rand(len(ends), self.keys, generator=generator, device=ends.device)
        hidden = torch.arange(self.keys, device=ends.device) >= ends[:, None]
        return order.masked_fill(hidden, -1).topk(self.topk, sorted=False).indices.int().sort(-1).values


def _prefill(name: str, heads: int, keys: int, *targets: Target) -> AttentionCase:
    return AttentionCase(f"prefill-{name}", 1, 4096, heads, keys, targets=targets)


def _decode(name: str, batch: int, *targets: Target, heads: int = 128, queries: int = 1) -> AttentionCase:
    fp8 = name.startswith("fp8")
    return AttentionCase(f"decode-{name}", batch, queries, heads, CONTEXT, fp8, targets=targets)


CASES = (
    _prefill("128h-8k", 128, 8 << 10, Target(480, "TFLOP/s")),
    _prefill("128h-128k", 128, 128 << 10, Target(430, "TFLOP/s")),
    _prefill("64h-8k", 64, 8 << 10, Target(465, "TFLOP/s")),
    _prefill("64h-128k", 64, 128 << 10, Target(390, "TFLOP/s")),
    _decode("fp8-b1", 1, Target(14, "us")),
    _decode("fp8-b8", 8, Target(30, "us")),
    _decode("fp8-b64", 64, Target(125, "us")),
    _decode("fp8-b128", 128, Target(245, "us")),
    _decode("fp8-b128-t2", 128, Target(480, "us"), queries=2),
    _decode("fp8-64h-b8", 8, Target(24, "us"), heads=64),
    _decode("fp8-64h-b64", 64, Target(85, "us"), heads=64),
    _decode("fp8-64h-b128", 128, Target(130, "us"), heads=64),
    _decode("bf16-b1", 1, Target(14, "us")),
    _decode("bf16-b8", 8, Target(28, "us")),
    _decode("bf16-b64", 64, Target(110, "us")),
    _decode("bf16-b128", 128, Target(210, "us")),
    _decode("fp8-16h-b64", 64, Target(50, "us"), heads=16),
    _decode("bf16-16h-b64", 64, Target(55, "us"), heads=16),
)
"""DeepSeek-V3.2's attention: queries and keys of 576, values of 512, 2048 selected tokens."""
