"""GLM-5, 5.1 and 5.2.

Class: transformers ``GlmMoeDsaForCausalLM``. Its indexer turns interleaved pairs. ``config.indexer_types`` names the
layers that share the selection before them. The stock class caches expanded keys and values and scores against an
[S, T] mask; the prepared one does neither.
"""

from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

from dsa_compile.models.family import Family
from dsa_compile.models.latent_attention import LatentAttention, NativeIndexer
from dsa_compile.models.mtp import MTPLayer
from dsa_compile.models.prepared import PreparedModel


class GlmMoeDsaAttention(LatentAttention, hf.GlmMoeDsaAttention):
    """Latent attention of a prepared model."""


class GlmMoeDsaIndexer(NativeIndexer, hf.GlmMoeDsaIndexer):
    """The model's own indexer, emitting ``dsa::select``."""


class GlmMoeDsaMTPLayer(MTPLayer, hf.GlmMoeDsaDecoderLayer):  # type: ignore[misc]
    """The layer behind the last, which drafts."""


class GlmMoeDsaForCausalLM(PreparedModel, hf.GlmMoeDsaForCausalLM):  # type: ignore[misc]
    """A prepared model; the name is that of its stock class, which checkpoints carry."""


FAMILY = Family(
    model_type="glm_moe_dsa",
    classes={
        hf.GlmMoeDsaAttention: GlmMoeDsaAttention,
        hf.GlmMoeDsaIndexer: GlmMoeDsaIndexer,
        hf.GlmMoeDsaForCausalLM: GlmMoeDsaForCausalLM,
    },
    index_rope="interleaved",
    native_indexer=True,
    mtp_layer=GlmMoeDsaMTPLayer,
)
