"""Hypothesis strategies: sizes, lengths, selections and seeds. Tensors are filled by a seeded generator."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsa_compile.dims import IndexerDims, LayerDims

seeds = st.integers(0, 2**31 - 1)

SELECTION_KINDS = ("ascending", "short", "holes", "none", "leading", "last", "shuffled", "outside")


def mla_dims() -> st.SearchStrategy[LayerDims]:
    """Sizes of small layers; no two of them need be equal, and heads are no power of two."""
    return st.builds(
        LayerDims,
        n_heads=st.sampled_from([1, 2, 3, 8, 22]),
        kv_lora_rank=st.sampled_from([4, 9, 16]),
        qk_nope_head_dim=st.sampled_from([3, 8]),
        qk_rope_head_dim=st.sampled_from([2, 4]),
        v_head_dim=st.sampled_from([5, 8]),
        indexer=st.none() | indexer_dims(),
    )


def indexer_dims() -> st.SearchStrategy[IndexerDims]:
    return st.builds(IndexerDims, n_heads=st.sampled_from([1, 3, 8]), head_dim=st.sampled_from([4, 8, 12]))


def lengths(index_topk: int) -> st.SearchStrategy[int]:
    """Numbers of tokens from 1 to 5 K, with the edges around K drawn often."""
    edges = {1, max(1, index_topk - 1), index_topk, index_topk + 1}
    return st.sampled_from(sorted(edges)) | st.integers(1, 5 * index_topk)


@st.composite
def selections(draw: Any, batch: int, rows: int, slots: int, index_topk: int) -> Tensor:
    """int32[B, T, K] whose rows are of the `SELECTION_KINDS`."""
    kinds = draw(st.lists(st.sampled_from(SELECTION_KINDS), min_size=batch * rows, max_size=batch * rows))
    generator = torch.Generator().manual_seed(draw(seeds))
    picked = [selection_row(kind, slots, index_topk, generator) for kind in kinds]
    return torch.stack(picked).view(batch, rows, index_topk)


def selection_row(kind: str, slots: int, index_topk: int, generator: torch.Generator) -> Tensor:
    """int32[K] of distinct slots in one of the forms that a selection may arrive in."""
    count = min(slots, index_topk)
    row = torch.full((index_topk,), -1, dtype=torch.int32)
    shuffled = torch.randperm(slots, generator=generator)[:count].int()
    row[:count] = shuffled.sort().values
    if kind == "short":
        row[(count + 1) // 2 :] = -1
    elif kind == "holes":
        row[torch.rand(index_topk, generator=generator) < 0.5] = -1
    elif kind == "none":
        row[:] = -1
    elif kind == "leading":
        row = row.roll(index_topk - count)
        row[: index_topk // 2] = -1
    elif kind == "last":
        row[:] = -1
        row[-1] = shuffled[0]
    elif kind == "shuffled":
        row[:count] = shuffled
    elif kind == "outside":
        row[::2] = torch.tensor([slots, -7, 2**31 - 1, -(2**31)]).repeat(index_topk)[: len(row[::2])].int()
    return row


@dataclass(frozen=True)
class Rows:
    """Inputs of one MLA attention: B sequences of T queries over S slots."""

    q: Tensor
    c_kv: Tensor
    k_pe: Tensor
    kv_b_weight: Tensor
    visible: Tensor
    nope: int
    scale: float

    @property
    def attention(self) -> tuple[Any, ...]:
        return self.q, self.c_kv, self.k_pe, self.kv_b_weight


def mla_rows(
    dims: LayerDims,
    batch: int,
    rows: int,
    slots: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    spans: bool = False,
) -> Rows:
    """Normal inputs. Queries are the last tokens of their sequence, or with ``spans`` see any range, empty ones too."""
    generator = torch.Generator().manual_seed(seed)
    H, N, P, V, R = (
        dims.n_heads,
        dims.qk_nope_head_dim,
        dims.qk_rope_head_dim,
        dims.v_head_dim,
        dims.kv_lora_rank,
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    if spans:
        visible = torch.randint(0, slots + 1, (batch, 1, rows, 2), generator=generator, dtype=torch.int32)
        visible[..., 1] -= visible[..., 0] % 3  # some ends lie before their start
    else:
        visible = causal(batch, rows, slots)
    return Rows(
        normal(batch, H, rows, N + P),
        normal(batch, slots, R),
        normal(batch, slots, P),
        normal(H * (N + V), R),
        visible.to(device),
        N,
        (N + P) ** -0.5,
    )


def causal(batch: int, rows: int, slots: int) -> Tensor:
    """visible int32[B, 1, T, 2] of queries that are the last T of S tokens."""
    end = (torch.arange(rows) + 1 + slots - rows).clamp_min(0).int()
    return torch.stack([torch.zeros_like(end), end], -1).expand(batch, 1, rows, 2).contiguous()


def mask_of(visible: Tensor, slots: int) -> Tensor:
    """mask bool[B, 1, T, S] that says what ``visible`` says."""
    positions = torch.arange(slots, device=visible.device)
    return (positions >= visible[..., :1]) & (positions < visible[..., 1:])
