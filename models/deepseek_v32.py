"""DeepSeek-V3.2.

Class: transformers ``DeepseekV32ForCausalLM``. Its indexer turns half-split pairs where its attention turns
interleaved ones. The stock class caches expanded keys and values and scores against an [S, T] mask; the prepared one
does neither.
"""

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

from dsa_compile.models.family import Family
from dsa_compile.models.latent_attention import LatentAttention, NativeIndexer
from dsa_compile.models.mtp import MTPLayer
from dsa_compile.models.prepared import PreparedModel


class DeepseekV32Attention(LatentAttention, hf.DeepseekV32Attention):
    """Latent attention of a prepared model."""


class DeepseekV32Indexer(NativeIndexer, hf.DeepseekV32Indexer):
    """The model's own indexer, emitting ``dsa::select``."""


class DeepseekV32MTPLayer(MTPLayer, hf.DeepseekV32DecoderLayer):  # type: ignore[misc]
    """The layer behind the last, which drafts."""


class DeepseekV32ForCausalLM(PreparedModel, hf.DeepseekV32ForCausalLM):  # type: ignore[misc]
    """A prepared model; the name is that of its stock class, which checkpoints carry."""


FAMILY = Family(
    model_type="deepseek_v32",
    classes={
        hf.DeepseekV32Attention: DeepseekV32Attention,
        hf.DeepseekV32Indexer: DeepseekV32Indexer,
        hf.DeepseekV32ForCausalLM: DeepseekV32ForCausalLM,
    },
    index_rope="half",
    native_indexer=True,
    mtp_layer=DeepseekV32MTPLayer,
)
