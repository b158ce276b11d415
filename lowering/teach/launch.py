"""Teaching on CUDA: Triton kernels, a chunk of rows at a time."""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.rows import chosen
from dsa_compile.lowering.select import launch as select_launch
from dsa_compile.lowering.select.configs import Config as ScoreConfig
from dsa_compile.lowering.teach import configs
from dsa_compile.lowering.teach.configs import Call, Tile, Tiles
from dsa_compile.lowering.teach.reference import teach

BUDGET = 512 << 20
"""Bytes of targets and index scores that a chunk of rows holds at once."""
ALIGNMENT = 16
"""A row of them begins at a multiple of so many, so that Triton reads 16 bytes at a time."""
LANES = 1024
"""Slots of a row that its divergence is summed over at once."""


class Teacher(NamedTuple):
    """q: [B, H, T, N+P]. kv: nope keys and values of each head, [B, T, H*(N+V)]. k_pe: [B, T, P]."""

    q: Tensor
    kv: Tensor
    k_pe: Tensor


class Student(NamedTuple):
    """q: [B, T, HI, DI]. weights: [B, T, HI]. keys: [B, T, DI]."""

    q: Tensor
    weights: Tensor
    keys: Tensor


def teach_cuda(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor,
    topk_indices: Tensor | None,
    index_q: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    nope: int,
    scale: float,
    index_scale: float,
    wanted: bool,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`reference.teach` by Triton kernels, or by the reference with a warning that names the limit.

    Gradients are summed in float32, in one order. Products of float32 values are in TF32 where
    ``torch.backends.cuda.matmul.allow_tf32`` says so, else in three products of TF32 parts.
    """
    call, device = call_of(q, kv_b_weight, index_q, nope), Device.of(q.device)
    reason = configs.refusal(call, device)
    operands = q, c_kv, k_pe, kv_b_weight, visible, topk_indices, index_q, index_weights, index_keys
    if reason is not None:
        warnings.warn(f"teaching runs as its reference, not as Triton kernels: {reason}.", stacklevel=4)
        return teach(*operands, nope, scale, index_scale, wanted, temperature)
    tiles = configs.tiles(call, device)
    return launch(*operands, nope, scale, index_scale, wanted, tiles, device.processors, temperature)


def call_of(q: Tensor, kv_b_weight: Tensor, index_q: Tensor, nope: int) -> Call:
    B, H, T, width = q.shape
    return Call(
        dtype=q.dtype,
        index_dtype=index_q.dtype,
        heads=H,
        nope=nope,
        rope=width - nope,
        value=kv_b_weight.shape[0] // H - nope,
        index_heads=index_q.shape[2],
        index_dim=index_q.shape[3],
        batch=B,
        tokens=T,
    )


def launch(
    q: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    visible: Tensor,
    topk_indices: Tensor | None,
    index_q: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    nope: int,
    scale: float,
    index_scale: float,
    wanted: bool,
    tiles: Tiles,
    processors: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the kernels in these tiles; autocast or not, the teacher is in q's dtype and the student in index_q's."""
    call = call_of(q, kv_b_weight, index_q, nope)
    H, V = call.heads, call.value
    B, T, width = call.batch, call.tokens, -(-call.tokens // ALIGNMENT) * ALIGNMENT
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        kv = F.linear(c_kv.to(q.dtype), kv_b_weight.to(q.dtype))
        teacher = [_factor(x) for x in (q, kv, k_pe.to(q.dtype))]
        index_rows = _factor(index_q.detach()), _factor(index_keys.detach().to(index_q.dtype))
        student = index_rows[0], _rows_of(index_weights.detach()), index_rows[1]
        visible, out = visible.contiguous(), q.new_empty(B, T, H, V)
        losses = q.new_zeros(B, T, dtype=torch.float32)
        index_q_grad = torch.empty_like(index_q, memory_format=torch.contiguous_format)
        weights_grad = torch.empty(index_weights.shape, dtype=torch.float32, device=q.device)
        keys_grad = torch.zeros(index_keys.shape, dtype=torch.float32, device=q.device)
        for sequences, rows in chunks(B, T, BUDGET // (8 * width)):
            teaching, learning = Teacher(*(x[sequences] for x in teacher)), Student(*(x[sequences] for x in student))
            seen, n = visible[sequences], rows.stop - rows.start
            keep = None if topk_indices is None else chosen(topk_indices[sequences], rows, T)
            target, scores = q.new_empty(2, len(seen), n, width, dtype=torch.float32)
            lse = attend(out[sequences], teaching, seen, keep, rows, scale, call, tiles.attend)
            write_target(target, teaching, seen, lse / temperature, rows, scale / temperature, call, tiles.target)
            write_scores(scores, learning, seen, rows, index_scale, tiles.scores)
            losses[sequences, rows] = diverge(target, scores, seen, keep, rows, flat=temperature != 1)
            if wanted:
                grads = Student(index_q_grad[sequences], weights_grad[sequences], keys_grad[sequences])
                row_gradients(grads, learning, seen, scores, rows, index_scale, call, tiles.rows)
                column_gradients(grads, learning, seen, scores, rows, index_scale, call, tiles.columns, processors)
    made = [index_q_grad, weights_grad.to(index_weights.dtype), keys_grad.to(index_keys.dtype)]
    return out, losses.sum(), made if wanted else []


def chunks(batch: int, tokens: int, most_rows: int) -> Iterator[tuple[slice, slice]]:
    """Sequences and their rows: as many whole sequences as fit into ``most_rows``, or parts of one.

    Parts are of a multiple of 128 rows, and of 128 at least.
    """
    together = max(1, most_rows // tokens)
    step = tokens if most_rows >= tokens else max(128, most_rows // 128 * 128)
    for first in range(0, batch, together):
        for start in range(0, tokens, step):
            yield slice(first, min(first + together, batch)), slice(start, min(start + step, tokens))


def attend(
    out: Tensor,
    teacher: Teacher,
    visible: Tensor,
    keep: Tensor | None,
    rows: slice,
    scale: float,
    call: Call,
    tile: Tile,
) -> Tensor:
    """Write ``rows`` of out [B, T, H, V], and give their log-sum-exp to the base of 2, float32[B, H, t].

    Args:
        visible: int32[B, 1, T, 2], contiguous. keep: bool[B, t, T], what is selected; None: everything.
    """
    from dsa_compile.lowering.teach import teacher_kernel

    B, n = len(out), rows.stop - rows.start
    lse = out.new_empty(B, call.heads, n, dtype=torch.float32)
    teacher_kernel.attend[(B * call.heads * -(-n // tile.rows),)](
        *teacher,
        visible,
        visible if keep is None else keep.view(torch.uint8),
        out,
        lse,
        *_strides(teacher),
        *out.stride()[:2],
        0 if keep is None else keep.stride(1),
        rows.start,
        n,
        call.tokens,
        scale,
        SELECTED=keep is not None,
        **configs.attend_constants(call, tile),
    )
    return lse


def write_target(
    target: Tensor,
    teacher: Teacher,
    visible: Tensor,
    lse: Tensor,
    rows: slice,
    scale: float,
    call: Call,
    tile: Tile,
) -> None:
    """Write the mean over heads of exp(score - lse) to target float32[B, t, width], at least where ``rows`` see a slot.

    ``lse``: see `attend`. It and ``scale`` over a temperature give probabilities to the power of its inverse.
    """
    from dsa_compile.lowering.teach import teacher_kernel

    B, n = target.shape[:2]
    teacher_kernel.target[(B * -(-n // tile.rows) * -(-call.tokens // tile.slots),)](
        *teacher,
        visible,
        lse,
        target,
        *_strides(teacher),
        target.stride(1),
        rows.start,
        n,
        call.tokens,
        scale,
        **configs.target_constants(call, tile),
    )


def write_scores(
    scores: Tensor, student: Student, visible: Tensor, rows: slice, scale: float, config: ScoreConfig
) -> None:
    """Write the index scores of ``rows`` to scores float32[B, t, width], where they see a slot."""
    B, n = scores.shape[:2]
    T = student.q.shape[1]
    call = select_launch.call_of(student.q, student.keys, None, None)
    queries = config.queries(call, n)
    select_launch.score(
        scores.view(B * n, -1)[:, :T],
        *student,
        visible,
        0,
        scale,
        None,
        None,
        first_row=rows.start,
        blocks=range(rows.start // queries, (B - 1) * -(-T // queries) + -(-rows.stop // queries)),
        splits=1,
        constants=config.constants(call, queries),
    )


def diverge(target: Tensor, scores: Tensor, visible: Tensor, keep: Tensor | None, rows: slice, *, flat: bool) -> Tensor:
    """float32[B, t]: KL(target || softmax(scores)) of each row; over its scores goes their gradient.

    ``flat``: a row of the target has any sum, and is divided by it.
    """
    from dsa_compile.lowering.teach import student_kernel

    B, n, width = scores.shape
    losses = scores.new_empty(B, n)
    student_kernel.diverge[(B * n,)](
        target,
        scores,
        visible,
        visible if keep is None else keep.view(torch.uint8),
        losses,
        width,
        0 if keep is None else keep.stride(1),
        rows.start,
        n,
        visible.shape[2],
        SELECTED=keep is not None,
        FLAT=flat,
        BLOCK=LANES,
    )
    return losses


def row_gradients(
    grads: Student,
    student: Student,
    visible: Tensor,
    grad: Tensor,
    rows: slice,
    scale: float,
    call: Call,
    tile: Tile,
) -> None:
    """Write ``rows`` of the gradients in index queries and head weights, from that in scores, float32[B, t, width]."""
    from dsa_compile.lowering.teach import student_kernel

    B, n, width = grad.shape
    student_kernel.row_gradients[(B * -(-n // configs.queries(call, tile)),)](
        *student,
        visible,
        grad,
        grads.q,
        grads.weights,
        *_strides(student),
        width,
        rows.start,
        n,
        call.tokens,
        scale,
        **configs.row_constants(call, tile),
    )


def column_gradients(
    grads: Student,
    student: Student,
    visible: Tensor,
    grad: Tensor,
    rows: slice,
    scale: float,
    call: Call,
    tile: Tile,
    processors: int,
) -> None:
    """Add what ``rows`` give to the gradient in index keys, float32, from that in scores, float32[B, t, width]."""
    from dsa_compile.lowering.teach import student_kernel

    B, n, width = grad.shape
    splits = configs.splits(call, tile, B, n, processors)
    parts = grad.new_empty(splits, *student.keys.shape)
    student_kernel.column_gradients[(splits * B * -(-call.tokens // tile.slots),)](
        student.q,
        student.weights.transpose(1, 2).contiguous(),
        student.keys,
        visible,
        grad,
        parts,
        *student.q.stride()[:3],
        *student.keys.stride()[:2],
        width,
        rows.start,
        n,
        call.tokens,
        B,
        splits,
        scale,
        **configs.column_constants(call, tile),
    )
    grads.keys.add_(parts.sum(0))


def _strides(operands: Teacher | Student) -> list[int]:
    """Of each in all but its last dimension."""
    return [stride for x in operands for stride in x.stride()[:-1]]


def _factor(x: Tensor) -> Tensor:
    """``x`` as a kernel multiplies it: contiguous in its last dimension, and where it is cut to TF32 rounded to that.

    Bits that are cut make every product too small, and p and softmax(I) too flat.
    """
    if x.dtype != torch.float32 or configs.precision() != "tf32":
        return _rows_of(x)
    cut = x.contiguous().view(torch.int32)
    return torch.where(x.isfinite(), (cut + (1 << 12)).bitwise_and_(-1 << 13).view(torch.float32), x)


def _rows_of(x: Tensor) -> Tensor:
    """``x``, contiguous in its last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
