"""Masked attention on CUDA: bits of a part of the rows, then heads a group at a time, expanded and attended."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsa_compile.dims import LayerDims
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.masked_mha import configs, gluon
from dsa_compile.lowering.masked_mha.configs import WORD, Config
from dsa_compile.lowering.rows import row_slices
from dsa_compile.lowering.sparse_mla.gluon import aligned


def masked_mha(
    q: Tensor,
    latent: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor | None,
    scale: float,
    dims: LayerDims,
    config: Config | None = None,
) -> Tensor:
    """Attention by keys and values of all heads, over what is selected and visible.

    Args:
        q: [B, H, T, N+P] of a dtype that `configs.refusal` has nothing against. latent: values [B, S, R+P].
        kv_b_weight: [H*(N+V), R]. visible, topk_indices: see `dsa_compile.dims`; None: everything.
        dims: the layer's sizes. config: None chooses.

    Returns:
        [B, T, H, V]. A row that attends to a slot of NaN or inf is NaN, one that sees nothing is 0.
    """
    B, H, T, _ = q.shape
    R, S = dims.kv_lora_rank, latent.shape[1]
    out = q.new_empty(B, T, H, dims.v_head_dim)
    if out.numel() == 0:
        return out
    if S == 0:
        return out.zero_()
    q = q if aligned(q) else q.contiguous()
    config = config or config_of(dims, q.dtype, scale, Device.of(q.device))
    # what is not finite must reach nobody by a weight of 0: its score alone says so
    bad = ~torch.linalg.vector_norm(latent, torch.inf, -1, keepdim=True).isfinite()
    c_kv, k_pe = latent[..., :R].masked_fill(bad, 0), latent[..., R:].masked_fill(bad, float("nan"))
    weight = kv_b_weight.unflatten(0, (H, -1))
    step = configs.heads_at_once(dims, T, S)
    for rows in row_slices(T, B * S // 8, configs.BITS_BUDGET):
        mask = _mask(
            q[:, :, rows],
            None if visible is None else visible[:, :, rows],
            None if topk_indices is None else topk_indices[:, rows],
            S,
            config,
        )
        for first in range(0, H, step):
            heads = slice(first, first + step)
            expanded = F.linear(c_kv, weight[heads].flatten(0, 1)).unflatten(-1, (-1, weight.shape[1]))
            operands = q[:, heads, rows], expanded, k_pe, mask, scale, out[:, rows, heads]
            if config is gluon.CONFIG:
                gluon.attend(*operands)
            else:
                _attend(*operands, dims, config)
    return out


def config_of(dims: LayerDims, dtype: torch.dtype, scale: float, device: Device) -> Config:
    """That of the kernel for Hopper where it serves, else the portable one's."""
    refused = gluon.refusal(dims, dtype, scale, device)
    return gluon.CONFIG if refused is None else configs.config(dims, dtype, device)


def _mask(
    q: Tensor, visible: Tensor | None, topk_indices: Tensor | None, slots: int, config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """bits int32[B, T, words], blocks int32[B tiles, words of a row / words of a block] and how many count, int32."""
    from dsa_compile.lowering.masked_mha import kernel

    B, _, T, _ = q.shape
    words = -(-slots // config.keys) * config.keys // WORD
    tiles = B * -(-T // config.rows)
    per_block = config.keys // WORD
    ranges = {"HAS_VISIBLE": visible is not None}
    bits = q.new_zeros(B, T, words, dtype=torch.int32)
    blocks, counts = bits.new_zeros(tiles, words // per_block), bits.new_empty(tiles)
    seen = bits if visible is None else visible.contiguous()
    with torch.cuda.device_of(q):
        if topk_indices is None:
            kernel.visible_bits_kernel[(B * T,)](seen, bits, slots, words, **ranges, BLOCK=256)
        else:
            picks = topk_indices.contiguous()
            kernel.selected_bits_kernel[(B * T,)](
                picks, seen, bits, slots, picks.shape[-1], words, **ranges, BLOCK=1024
            )
        kernel.blocks_kernel[(tiles,)](
            bits, blocks, counts, T, words, ROWS=config.rows, BLOCK_WORDS=per_block, STEP=16, AT_ONCE=128 // per_block
        )
    return bits, blocks, counts


def _attend(
    q: Tensor,
    expanded: Tensor,
    k_pe: Tensor,
    mask: tuple[Tensor, Tensor, Tensor],
    scale: float,
    out: Tensor,
    dims: LayerDims,
    config: Config,
) -> None:
    """Write out [B, T, h, V] of q [B, h, T, N+P] over expanded [B, S, h, N+V] and k_pe [B, S, P]."""
    from dsa_compile.lowering.masked_mha import kernel

    bits, blocks, counts = mask
    key, value = expanded.split([dims.qk_nope_head_dim, dims.v_head_dim], -1)
    tiles = blocks.shape[0]
    with torch.cuda.device_of(q):
        kernel.attend_masked_kernel[(tiles * q.shape[1],)](
            q,
            key,
            k_pe,
            value,
            bits,
            blocks,
            counts,
            out,
            *q.stride()[:3],
            *key.stride()[:3],
            *k_pe.stride()[:2],
            *out.stride()[:3],
            key.shape[1],
            q.shape[2],
            bits.shape[-1],
            tiles,
            scale,
            **config.constants(dims),
        )
