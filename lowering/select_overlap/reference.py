"""Reference of ``dsa::select_start`` and ``dsa::select_wait``: the first does all the work."""

from torch import Tensor

from dsa_compile.lowering.select.reference import select


def select_start(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    index_topk: int,
    scale: float,
    budget: int,
    block_table: Tensor | None = None,
    index_scales: Tensor | None = None,
) -> Tensor:
    """What `select` of the same arguments returns."""
    return select(q, weights, index_keys, visible, mask, index_topk, scale, budget, block_table, index_scales)


def select_wait(topk_indices: Tensor, reads: list[Tensor]) -> None:
    """Nothing: ``topk_indices``, which `select_start` returned, are there. ``reads``: its tensors."""
