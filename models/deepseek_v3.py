"""DeepSeek-V3 and R1, Kimi-K2, Moonlight.

Class: transformers ``DeepseekV3ForCausalLM``. Its checkpoints hold no indexer: one is attached, or a selector without
weights is chosen.
"""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from dsa_compile.models.family import Family
from dsa_compile.models.latent_attention import LatentAttention
from dsa_compile.models.mtp import MTPLayer
from dsa_compile.models.prepared import PreparedModel


class DeepseekV3Attention(LatentAttention, hf.DeepseekV3Attention):
    """Latent attention of a prepared model."""


class DeepseekV3MTPLayer(MTPLayer, hf.DeepseekV3DecoderLayer):  # type: ignore[misc]
    """The layer behind the last, which drafts."""


class DeepseekV3ForCausalLM(PreparedModel, hf.DeepseekV3ForCausalLM):  # type: ignore[misc]
    """A prepared model; the name is that of its stock class, which checkpoints carry."""


FAMILY = Family(
    model_type="deepseek_v3",
    classes={hf.DeepseekV3Attention: DeepseekV3Attention, hf.DeepseekV3ForCausalLM: DeepseekV3ForCausalLM},
    index_rope="half",
    mtp_layer=DeepseekV3MTPLayer,
)
