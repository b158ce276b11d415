"""From hidden states to index queries, keys and head weights, as DeepSeek-V3.2 and GLM-5 indexers define them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsa_compile.errors import ConfigError

K_NORM_EPS = 1e-6
"""Of the indexer's LayerNorm, whatever the model's own epsilon is."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """RoPE of ``x`` [B, T, heads, P] by ``cos``/``sin`` [B or 1, T, P] (two equal halves).

    ``layout``: ``"half"`` pairs dimension i with i + P/2 (V3.2's indexer), ``"interleaved"`` 2i with 2i + 1 (GLM-5's),
    with the rotated pairs stored half-split, as transformers does.
    """
    cos, sin = cos.chunk(2, -1)[0].unsqueeze(2), sin.chunk(2, -1)[0].unsqueeze(2)
    if layout == "half":
        x1, x2 = x.chunk(2, -1)
    elif layout == "interleaved":
        x1, x2 = x[..., 0::2], x[..., 1::2]
    else:
        raise ValueError(f"index RoPE layout: expected 'half' or 'interleaved', came {layout!r}.")
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def hadamard(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal Hadamard matrix [DI, DI] in Sylvester's order.

    Rotated by it, queries and keys keep their products. What both have in one dimension spreads over all DI, whose
    errors in fp8 cancel; what keys alone have there costs the more the less queries have.

    Raises:
        ConfigError: DI is no power of two.
    """
    if head_dim & (head_dim - 1):
        raise ConfigError(
            f"CacheConfig.rotate_index: expected an index_head_dim that is a power of two, came {head_dim}. Leave it "
            "out: it changes no exact score."
        )
    pair, signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device), torch.ones(1, 1, device=device)
    while len(signs) < head_dim:
        signs = torch.kron(pair, signs)
    return signs.to(dtype) * head_dim**-0.5


def project(
    x: Tensor,
    q_latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    wq_b: Tensor,
    wk: Tensor,
    k_norm_weight: Tensor,
    k_norm_bias: Tensor,
    weights_proj: Tensor,
    rotation: Tensor | None = None,
    *,
    n_heads: int,
    head_dim: int,
    rope_dim: int,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Index queries [B, T, HI, DI], index keys [B, T, DI] and head weights float32[B, T, HI].

    What an indexer learns reaches its own weights alone: its inputs are detached (DeepSeek-V3.2 report, section 2.1).

    Args:
        x: the attention's input [B, T, hidden]. q_latent: the normed query latent [B, T, L] (x where there is none).
        cos, sin: the model's own [B or 1, T, P]. The first ``rope_dim`` dimensions of a head are rotated.
        wq_b: [HI*DI, L]. wk: [DI, hidden]. k_norm_*: [DI]. weights_proj: [HI, hidden], kept in its own dtype.
        rotation: orthonormal [DI, DI] that queries and keys are multiplied by behind RoPE; see `hadamard`.
    """
    x, q_latent = x.detach(), q_latent.detach()
    wq_b, wk, k_norm_weight, k_norm_bias = (p.to(x.dtype) for p in (wq_b, wk, k_norm_weight, k_norm_bias))
    q = F.linear(q_latent, wq_b).unflatten(-1, (n_heads, head_dim))
    k = F.layer_norm(F.linear(x, wk), [head_dim], k_norm_weight, k_norm_bias, K_NORM_EPS).unsqueeze(2)
    q = torch.cat([rotate(q[..., :rope_dim], cos, sin, layout), q[..., rope_dim:]], -1)
    k = torch.cat([rotate(k[..., :rope_dim], cos, sin, layout), k[..., rope_dim:]], -1).squeeze(2)
    if rotation is not None:
        q, k = q @ rotation, k @ rotation
    weights = F.linear(x.to(weights_proj.dtype), weights_proj).float() * n_heads**-0.5
    return q, k, weights
