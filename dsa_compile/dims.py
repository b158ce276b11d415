"""The dimension legend and the sizes of an MLA layer.

Letters, used in every docstring:

====  ==========================  ====  ==========================
B     sequences                   L     q_lora_rank
T     query tokens                HI    index_n_heads
S     key slots                   DI    index_head_dim
H     attention heads             K     index_topk
R     kv_lora_rank                M     draft tokens
N     qk_nope_head_dim            V     v_head_dim
P     qk_rope_head_dim
====  ==========================  ====  ==========================

Conventions that every op, pass and cache holds:

* **The cache is compact.** A sequence's valid tokens lie in slots 0, 1, 2, ...; padding is never written. Lengths are
  ``[B]`` and may differ. Left padding, holes in a mask, padded turns and rejected drafts are all a length.
* ``visible`` ``int32[B, 1, T, 2]`` is the half-open range ``[start, end)`` of slots that a query may see. A padded
  query has an empty range; a valid query of slot s has ``end == s + 1``, so the range also names the slot it writes.
* ``mask`` ``bool[B or 1, 1, T, S]`` (True: may be seen) exists for graphs of models that were not prepared.
* ``topk_indices`` ``int32[B, T, K]`` holds slots of the row's own sequence, ascending, then -1. A row attends to the
  slots that are in it *and* visible. Ties go to the lower slot, NaN scores lose to every number, and -inf is not
  chosen. A row that sees at most K slots takes them all, whatever their scores.
* ``block_table`` ``int32[B, pages]``, where one is given, spreads a sequence over pages: pools are
  ``[pages of all sequences, page size, ...]`` and slot s lies in row ``s % page size`` of page
  ``block_table[b, s // page size]``. An entry outside the pool is an absent page: nobody attends to its slots, and
  writes to it leave no trace. Slots stay logical everywhere else. Without it a pool is ``[B, S, ...]``.
* A pool of latents is in the model's dtype, or ``uint8`` rows in fp8 (`dsa_compile.lowering.fp8_rows`). It has no
  gradient in fp8 or in pages.
* A pool of index keys is in the model's dtype, or ``uint8`` codes in fp8 with a pool of ``index_scales`` ``float32``
  beside it, one a key (`dsa_compile.lowering.fp8_keys`). Then index queries are rounded to fp8 as well.
* A row that sees nothing gives output 0 and log-sum-exp -inf, never NaN. NaN in a slot reaches only rows that see it.
"""

from dataclasses import dataclass

LARGEST_TOPK = 8192
"""K of ``dsa::select`` at most."""


@dataclass(frozen=True, kw_only=True)
class IndexerDims:
    """Sizes of a lightning indexer (DeepSeek-V3.2 report, section 2.1)."""

    n_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class LayerDims:
    """Sizes of one MLA layer as its cache and cost see them.

    ``indexer`` is None where it owns no index keys. ``kept_topk``: K where the layer attends to the selection of the
    token before, which its cache then keeps; else 0.
    """

    n_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: IndexerDims | None = None
    kept_topk: int = 0

    @property
    def latent_width(self) -> int:
        """Values of one latent row ``[kv_c | k_pe]``: R + P."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def expanded_values_per_token(self) -> int:
        """Values that a cache of expanded keys and values holds for one token (stock DeepSeek-V3.2 in transformers)."""
        return self.n_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
