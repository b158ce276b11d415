"""DeepSeek-V2 and V2-Lite (without a query latent). RoPE is complex (``freqs_cis``).

Class: transformers ``DeepseekV2ForCausalLM``. Its checkpoints hold no indexer: one is attached, or a selector without
weights is chosen.
"""

from transformers.models.deepseek_v2 import modeling_deepseek_v2 as hf

from dsa_compile.models.family import Family
from dsa_compile.models.latent_attention import LatentAttention
from dsa_compile.models.prepared import PreparedModel


class DeepseekV2Attention(LatentAttention, hf.DeepseekV2Attention):
    """Latent attention of a prepared model."""


class DeepseekV2ForCausalLM(PreparedModel, hf.DeepseekV2ForCausalLM):  # type: ignore[misc]
    """A prepared model; the name is that of its stock class, which checkpoints carry."""


FAMILY = Family(
    model_type="deepseek_v2",
    classes={hf.DeepseekV2Attention: DeepseekV2Attention, hf.DeepseekV2ForCausalLM: DeepseekV2ForCausalLM},
    index_rope="half",
)
