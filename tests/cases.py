"""The models and inputs that end-to-end tests share."""

import copy
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import dsa_compile
from dsa_compile.dims import IndexerDims, LayerDims
from dsa_compile.models.miniature import miniature

TOPK = 8
NATIVE = ("deepseek_v32", "glm_moe_dsa")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2_lite": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
}
ALIKE = ("deepseek_v2", "deepseek_v2_lite", "glm_moe_dsa", "glm4_moe_lite")
"""Their layers are rewritten as deepseek_v3's or v32's are: beyond plain calls they are left to the slow tests."""
LENGTHS = (1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK + 3, 5 * TOPK)
ATOL = 2e-4
V32 = LayerDims(
    n_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    indexer=IndexerDims(n_heads=64, head_dim=128),
)
"""A layer of DeepSeek-V3.2 itself."""


@functools.cache
def stock(case: str, device: torch.device, layers: int = 3) -> Any:
    """A stock miniature; do not change it."""
    family, overrides = FAMILIES[case]
    if "indexer_types" in overrides:
        overrides = overrides | {"indexer_types": overrides["indexer_types"][:layers]}
    return miniature(family, num_hidden_layers=layers, **overrides).to(device)


@functools.cache
def stock_without_experts(case: str, device: torch.device) -> Any:
    """The same with dense MLPs in all three layers, captured twice as fast; do not change it."""
    family, overrides = FAMILIES[case]
    return miniature(family, first_k_dense_replace=3, **overrides).to(device)


def optimized(case: str, device: torch.device, lowering: str = "eager", layers: int = 3, **fields: Any) -> Any:
    """An optimized copy whose selection is the stock model's: its own indexers, or dense."""
    if FAMILIES[case][0] not in NATIVE:
        fields.setdefault("selector", "dense")
    return dsa_compile.optimize(copy.deepcopy(stock(case, device, layers)), lowering=lowering, **fields)


def each_unlike(cases: Iterable[str]) -> Any:
    """Parametrizes ``case``; those that are `ALIKE` are slow tests."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=pytest.mark.slow if case in ALIKE else ()) for case in cases]
    )


def token_ids(batch: int, length: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (batch, length), generator=generator).to(device)


def left_padded(batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Mask and positions of a batch whose sequence b lacks its first 3 * b columns."""
    mask = torch.ones(batch, length, dtype=torch.long, device=device)
    for row in range(batch):
        mask[row, : min(3 * row, length - 1)] = 0
    return with_positions(mask)


def with_positions(mask: Tensor) -> dict[str, Tensor]:
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def assert_rows_equal(ours: Tensor, theirs: Tensor, mask: Tensor | None = None, atol: float = ATOL) -> None:
    """Logits [B, T, vocab] agree on the rows that hold a token."""
    if mask is not None:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    torch.testing.assert_close(ours.double(), theirs.double(), atol=atol, rtol=0)
