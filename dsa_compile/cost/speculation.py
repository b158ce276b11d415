"""What multi-token prediction gains: the time of a speculative step under expert parallelism, and its tokens.

What is read once a request (attention weights, the cache) costs the same for M+1 tokens as for one; what is done for
each token (arithmetic, the all-to-all of the experts) costs M+1 times as much. So drafts pay where reading binds: at
small batches and long contexts. A layer takes the longer of its work and its all-to-all: two halves of a batch overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from dsa_compile.cost.attention import absorbed_pair_flops, index_pair_flops
from dsa_compile.cost.devices import Device
from dsa_compile.dims import IndexerDims, LayerDims

FP8_TILE = 128
"""Values sent in fp8 that share a scale."""

SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Served:
    """A mixture-of-experts model as one of many GPUs serves it.

    Attributes:
        attention: sizes of a layer; latents are in bfloat16, index keys in fp8.
        attention_weights: of a layer's projections; ``expert_weights``: of one expert. One byte each.
        routed_experts: that a token is sent to; ``shared_experts``: that it meets at home.
        local_experts: whose weights the GPU reads in every layer.
    """

    attention: LayerDims
    layers: int
    hidden: int
    vocab: int
    attention_weights: float
    expert_weights: float
    routed_experts: int
    shared_experts: int
    local_experts: int = 3

    def index_key_bytes(self) -> int:
        """Of a cached index key: its codes and one scale."""
        return 0 if self.attention.indexer is None else self.attention.indexer.head_dim + SCALE_BYTES

    def exchanged_bytes(self) -> int:
        """Of one token to one expert and back: dispatched in fp8 with its scales, combined in bfloat16."""
        return self.hidden + self.hidden // FP8_TILE * SCALE_BYTES + self.hidden * 2


DEEPSEEK_V32 = Served(
    attention=LayerDims(
        n_heads=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        indexer=IndexerDims(n_heads=64, head_dim=128),
    ),
    layers=61,
    hidden=7168,
    vocab=129_280,
    attention_weights=187_105_280,
    expert_weights=44_040_192,
    routed_experts=8,
    shared_experts=1,
)
"""Config of the checkpoint deepseek-ai/DeepSeek-V3.2; the indexers' own weights are left out."""

ACCEPTANCE = (0.85, 0.75, 0.65)
"""Assumed: how often a draft is accepted when all before it were. The DeepSeek-V3 report has 0.85 to 0.9 for the first.
"""


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens that a step yields: one, and each draft's when all up to it are accepted."""
    return 1 + sum(accumulate(acceptance, mul))


def step_seconds(
    model: Served,
    device: Device,
    batch: int,
    context: int,
    drafts: int,
    *,
    index_topk: int | None = None,
    head: bool = True,
) -> float:
    """One step of ``batch`` requests: M+1 tokens verified in all layers, then M drafts, each by one more layer.

    Args:
        context: cached tokens of a request. drafts: M.
        index_topk: K of sparse attention, for which each token reads its own selection; None: dense.
        head: count the language-model head, in bfloat16, of the verified tokens and of every draft.
    """
    tokens = batch * (drafts + 1)
    verify = model.layers * _layer_seconds(model, device, batch, tokens, context, index_topk)
    draft = _layer_seconds(model, device, batch, batch, context, index_topk)
    if head:
        verify += _head_seconds(model, device, tokens)
        draft += _head_seconds(model, device, batch)
    return verify + drafts * draft


def tokens_per_second(
    model: Served,
    device: Device,
    batch: int,
    context: int,
    acceptance: Sequence[float] = (),
    *,
    index_topk: int | None = None,
    head: bool = True,
) -> float:
    """Of one GPU, with as many drafts as there are acceptance rates; the rest as for `step_seconds`."""
    seconds = step_seconds(model, device, batch, context, len(acceptance), index_topk=index_topk, head=head)
    return batch * expected_tokens(acceptance) / seconds


def break_even_acceptance(
    model: Served, device: Device, batch: int, context: int, *, index_topk: int | None = None, head: bool = True
) -> float:
    """How often a single draft must be accepted to lose nothing; above 1 it cannot pay. As for `step_seconds`."""
    without, one = (
        step_seconds(model, device, batch, context, drafts, index_topk=index_topk, head=head) for drafts in (0, 1)
    )
    return one / without - 1


def _layer_seconds(
    model: Served, device: Device, batch: int, tokens: int, context: int, index_topk: int | None
) -> float:
    attention = _attention_seconds(model, device, batch, tokens, context, index_topk)
    met = model.routed_experts + model.shared_experts
    experts = max(
        model.local_experts * model.expert_weights / device.bandwidth,
        tokens * met * 2 * model.expert_weights / device.fp8_flops,
    )
    return max(attention + experts, tokens * model.routed_experts * model.exchanged_bytes() / device.network)


def _attention_seconds(
    model: Served, device: Device, batch: int, tokens: int, context: int, index_topk: int | None
) -> float:
    """The cache is read once a request, except for the rows that each token selects."""
    dims, row = model.attention, model.attention.latent_width * 2
    if index_topk is None or dims.indexer is None or context <= index_topk:
        read = batch * context * row
        work = tokens * context * absorbed_pair_flops(dims) / device.bf16_flops
    else:
        read = batch * context * model.index_key_bytes() + tokens * index_topk * row
        work = tokens * index_topk * absorbed_pair_flops(dims) / device.bf16_flops
        work += tokens * context * index_pair_flops(dims) / device.fp8_flops
    return max((model.attention_weights + read) / device.bandwidth, work)


def _head_seconds(model: Served, device: Device, tokens: int) -> float:
    weights = model.vocab * model.hidden
    return max(2 * weights / device.bandwidth, tokens * 2 * weights / device.bf16_flops)
