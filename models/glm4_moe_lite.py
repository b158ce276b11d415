"""GLM-4.7-Flash.

Class: transformers ``Glm4MoeLiteForCausalLM``. Its checkpoints hold no indexer: one is attached, or a selector without
weights is chosen.
"""

from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as hf

from dsa_compile.models.family import Family
from dsa_compile.models.latent_attention import LatentAttention
from dsa_compile.models.mtp import MTPLayer
from dsa_compile.models.prepared import PreparedModel


class Glm4MoeLiteAttention(LatentAttention, hf.Glm4MoeLiteAttention):
    """Latent attention of a prepared model."""


class Glm4MoeLiteMTPLayer(MTPLayer, hf.Glm4MoeLiteDecoderLayer):  # type: ignore[misc]
    """The layer behind the last, which drafts."""


class Glm4MoeLiteForCausalLM(PreparedModel, hf.Glm4MoeLiteForCausalLM):  # type: ignore[misc]
    """A prepared model; the name is that of its stock class, which checkpoints carry."""


FAMILY = Family(
    model_type="glm4_moe_lite",
    classes={hf.Glm4MoeLiteAttention: Glm4MoeLiteAttention, hf.Glm4MoeLiteForCausalLM: Glm4MoeLiteForCausalLM},
    index_rope="interleaved",
    mtp_layer=Glm4MoeLiteMTPLayer,
)
