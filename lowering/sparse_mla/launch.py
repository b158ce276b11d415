"""``dsa::sparse_mla`` on CUDA outside of Inductor: the same kernels, in their likeliest configuration."""

import warnings

import torch
from torch import Tensor

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.pages import slot_count
from dsa_compile.lowering.sparse_mla import configs, gluon
from dsa_compile.lowering.sparse_mla.configs import Call, Config
from dsa_compile.lowering.sparse_mla.limits import check
from dsa_compile.lowering.sparse_mla.reference import sparse_mla


def sparse_mla_cuda(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.sparse_mla` by the kernel for Hopper or the portable one, or by itself with a warning of the limit."""
    check(q_absorbed, q_pe, latent, visible, mask, topk_indices, block_table)
    call = call_of(q_absorbed, q_pe, latent, mask, topk_indices, block_table)
    reason = configs.refusal(call)
    if reason is not None:
        warn_of_refusal(reason)
        return sparse_mla(q_absorbed, q_pe, latent, visible, mask, topk_indices, scale, block_table)
    device = Device.of(q_absorbed.device)
    refused = gluon.refusal(call, device, block_table is not None, scale)
    if topk_indices is not None and refused is None and gluon.aligned(q_absorbed, q_pe, latent):
        return gluon.launch(q_absorbed, q_pe, latent, visible, topk_indices, scale, gluon.splits(call, device))
    config = configs.configs(call, device)[0]
    return launch(q_absorbed, q_pe, latent, visible, topk_indices, scale, block_table, config, device)


def call_of(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    mask: Tensor | None,
    topk_indices: Tensor | None,
    block_table: Tensor | None,
) -> Call:
    B, T, H, R = q_absorbed.shape
    return Call(
        dtype=q_absorbed.dtype,
        heads=H,
        rank=R,
        rope=q_pe.shape[-1],
        topk=None if topk_indices is None else topk_indices.shape[-1],
        slots=slot_count(latent, block_table),
        rows=B * T,
        fp8=latent.dtype == torch.uint8,
        masked=mask is not None,
    )


def warn_of_refusal(reason: str) -> None:
    warnings.warn(f"dsa::sparse_mla runs as its reference, not as a Triton kernel: {reason}.", stacklevel=3)


def launch(
    q_absorbed: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    visible: Tensor | None,
    topk_indices: Tensor | None,
    scale: float,
    block_table: Tensor | None,
    config: Config,
    device: Device,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one configuration of the portable kernel. ``splits``: shares of a row; None: as many as fill the device.

    The kernel gets the pool in the place of tensors that the call does not have.
    """
    from dsa_compile.lowering.sparse_mla import kernel

    B, T, H, R = q_absorbed.shape
    call = call_of(q_absorbed, q_pe, latent, None, topk_indices, block_table)
    splits = configs.splits(call, config, device) if splits is None else splits
    out = q_absorbed.new_empty(B, T, H, R)
    lse = q_absorbed.new_empty(B, T, H, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    parts = (out, lse) if splits == 1 else (out.new_empty(B, T, splits, H, R), lse.new_empty(B, T, splits, H))
    q_absorbed, q_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_absorbed, q_pe))
    reach = latent.shape[1] * latent.stride(1) if block_table is None else latent.shape[0] * latent.stride(0)
    visible_rows, picks, table = (latent if x is None else x.contiguous() for x in (visible, topk_indices, block_table))
    with torch.cuda.device_of(out):
        kernel.attend_kernel[(B * T * splits * -(-H // config.heads),)](
            q_absorbed,
            q_pe,
            latent,
            visible_rows,
            picks,
            table,
            *parts,
            *q_absorbed.stride()[:3],
            *q_pe.stride()[:3],
            latent.stride(0),
            latent.stride(1),
            latent.shape[0],
            0 if block_table is None else block_table.shape[1],
            call.slots,
            T,
            scale,
            PAGE=0 if block_table is None else latent.shape[1],
            FAR=reach >= 2**31,
            HAS_VISIBLE=visible is not None,
            **config.constants(call, splits),
        )
        if splits > 1:
            kernel.merge_kernel[(B * T * H,)](*parts, out, lse, **configs.merge_constants(H, R, splits))
    return out, lse
