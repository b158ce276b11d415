"""What a decode step takes at least: its weights read once, and its attention and indexers as fast as their kernels."""

from collections.abc import Mapping
from typing import Any


def weight_bytes(model: Any, batch: int) -> float:
    """Bytes of weights that a step of so many sequences reads, those of experts by the share that they draw on average.

    Every sequence draws its experts anew and each with the same chance; of embeddings a step reads a row a sequence.
    """
    config = model.config
    drawn = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    return sum(
        p.nbytes * (drawn if ".experts." in name else 1)
        for name, p in model.named_parameters()
        if "embed_tokens" not in name
    )


def floor_us(weights: float, gbytes: float, parts: Mapping[str, float]) -> float:
    """Microseconds of a step. ``weights``: bytes; ``gbytes``: GB/s of the device; ``parts``: us by kind of kernel."""
    return weights / gbytes / 1e3 + parts["attention"] + parts["indexer"]
