"""The sizes that the cost model reads of a Hugging Face config."""

from transformers import PretrainedConfig

from dsa_compile.config import DSAConfig
from dsa_compile.cost.speculation import Served
from dsa_compile.dims import IndexerDims, LayerDims
from dsa_compile.errors import UnsupportedModelError
from dsa_compile.models.family import FAMILIES


def served(config: PretrainedConfig) -> Served:
    """What the cost model needs to know of a Hugging Face config of one of our families.

    A config without an indexer gets one of the size that ``optimize`` would give it.

    Raises:
        UnsupportedModelError: it is of another family.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"cost: expected a config whose model_type is one of {', '.join(FAMILIES)}, came {config.model_type!r}."
        )
    attention = LayerDims(
        n_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        indexer=IndexerDims(
            n_heads=getattr(config, "index_n_heads", DSAConfig.index_n_heads),
            head_dim=getattr(config, "index_head_dim", DSAConfig.index_head_dim),
        ),
    )
    return Served(
        attention=attention,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        attention_weights=_attention_weights(attention, config.hidden_size, config.q_lora_rank),
        expert_weights=3 * config.hidden_size * config.moe_intermediate_size,
        routed_experts=config.num_experts_per_tok or 0,
        shared_experts=config.n_shared_experts or 0,
    )


def _attention_weights(dims: LayerDims, hidden: int, q_lora_rank: int | None) -> int:
    """Of the projections of a layer, its indexer left out."""
    query = dims.n_heads * (dims.qk_nope_head_dim + dims.qk_rope_head_dim)
    queries = hidden * query if q_lora_rank is None else q_lora_rank * (hidden + query)
    expanded = dims.n_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    return queries + hidden * dims.latent_width + dims.kv_lora_rank * expanded + dims.n_heads * dims.v_head_dim * hidden
