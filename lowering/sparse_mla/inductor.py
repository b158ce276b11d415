"""``dsa::sparse_mla`` in Inductor: Triton templates around `kernel`, chosen by Inductor's autotuning."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsa_compile import compat
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.sparse_mla import configs, gluon
from dsa_compile.lowering.sparse_mla.configs import Call
from dsa_compile.lowering.sparse_mla.launch import warn_of_refusal

NAME = "dsa_sparse_mla"
MERGE_NAME = "dsa_sparse_mla_merge"


@cache
def register() -> None:
    """Make Inductor lower the op to `templates`; a second call does nothing."""
    compat.register_lowering(torch.ops.dsa.sparse_mla.default, lower)


@cache
def templates() -> tuple[Any, Any]:
    """The template of `kernel.attend` and that of `kernel.merge`."""

    def attend_grid(rows: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple[Any, int, int]:
        return rows * meta["SPLITS"] * cdiv(meta["H"], meta["BLOCK_H"]), 1, 1

    def merge_grid(rows: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
        return rows * meta["H"], 1, 1

    folder = Path(__file__).parent
    # what Inductor keeps of a template is found by its text, which must change with the code that it calls
    version = f"# {compat.files_hash([str(folder / 'kernel.py')]).hex()}\n"
    return tuple(
        compat.triton_template(name, grid, version + (folder / f"{file}.py.jinja").read_text())
        for name, grid, file in ((NAME, attend_grid, "attend"), (MERGE_NAME, merge_grid, "merge"))
    )


def lower(
    q_absorbed: Any,
    q_pe: Any,
    latent: Any,
    visible: Any,
    mask: Any,
    topk_indices: Any,
    scale: float,
    block_table: Any = None,
) -> tuple[Any, Any]:
    """IR of out and lse: of the op as it stands off CUDA, where no kernel serves the call, and where `gluon` does.

    That kernel is no choice beside the templates: of a choice that is not made from source Inductor knows one output
    and nothing that it writes besides, and would order readers of lse before it.
    """
    op, arguments = torch.ops.dsa.sparse_mla.default, (q_absorbed, q_pe, latent, visible, mask, topk_indices)
    if q_absorbed.get_device().type != "cuda":
        return compat.fallback(op, *arguments, scale, block_table)
    call = call_of(q_absorbed, q_pe, latent, mask, topk_indices, block_table)
    reason = configs.refusal(call)
    if reason is not None:
        warn_of_refusal(reason)
        return compat.fallback(op, *arguments, scale, block_table)
    device = Device.of(q_absorbed.get_device())
    if gluon.refusal(call, device, block_table is not None, scale) is None:
        return compat.fallback(op, *arguments, scale, block_table)
    choices = configs.configs(call, device)
    splits = configs.splits(call, choices[0], device)
    out, lse = _attend(call, choices, splits, q_absorbed, q_pe, latent, visible, topk_indices, scale, block_table)
    return (out, lse) if splits == 1 else _merge(call, splits, out, lse)


def call_of(q_absorbed: Any, q_pe: Any, latent: Any, mask: Any, topk_indices: Any, block_table: Any) -> Call:
    B, T, H, R = q_absorbed.get_size()
    pages = 1 if block_table is None else compat.hint(block_table.get_size()[1])
    return Call(
        dtype=q_absorbed.get_dtype(),
        heads=int(H),
        rank=int(R),
        rope=int(q_pe.get_size()[-1]),
        topk=None if topk_indices is None else int(topk_indices.get_size()[-1]),
        slots=compat.hint(latent.get_size()[1]) * pages,
        rows=compat.hint(B) * compat.hint(T),
        fp8=latent.get_dtype() == torch.uint8,
        masked=mask is not None,
    )


def _attend(
    call: Call,
    choices: list[configs.Config],
    splits: int,
    q_absorbed: Any,
    q_pe: Any,
    latent: Any,
    visible: Any,
    topk_indices: Any,
    scale: float,
    block_table: Any,
) -> tuple[Any, Any]:
    B, T, H, R = q_absorbed.get_size()
    parted = [B, T] if splits == 1 else [B, T, splits]
    lse = compat.empty_buffer([*parted, H], torch.float32, q_absorbed.get_device())
    given = {"q": q_absorbed, "q_pe": q_pe, "latent": latent, "lse": lse}
    given |= {"visible": visible, "indices": topk_indices, "table": block_table}
    inputs = {name: compat.rows_in_memory(x) for name, x in given.items() if x is not None}
    for name in ("visible", "indices", "table"):
        if name in inputs:
            inputs[name] = compat.contiguous(inputs[name])
    options = {
        "SCALE": scale,
        "PAGE": 0 if block_table is None else int(latent.get_size()[1]),
        "FAR": not compat.known_below(_extent(inputs["latent"], block_table is not None), 2**31),
        "HAS_VISIBLE": visible is not None,
    }
    out = compat.autotuned(
        NAME,
        templates()[0],
        [choice.constants(call, splits) | options for choice in choices],
        list(inputs.values()),
        size=[*parted, H, R],
        dtype=q_absorbed.get_dtype(),
        grid_sizes=[B * T],
        mutated=[inputs["lse"]],
        examples={i: _example(name, call) for i, name in enumerate(inputs) if name in ("visible", "indices", "table")},
    )
    return out, lse


def _extent(latent: Any, paged: bool) -> Any:
    """Elements between the first and the last row of what is indexed as one: a sequence's pool, or all pages."""
    size, stride = latent.get_size(), latent.get_stride()
    return size[0] * stride[0] if paged else size[1] * stride[1]


def _merge(call: Call, splits: int, parts: Any, part_lse: Any) -> tuple[Any, Any]:
    B, T, _, H, R = parts.get_size()
    lse = compat.empty_buffer([B, T, H], torch.float32, parts.get_device())
    inputs = [compat.rows_in_memory(x) for x in (parts, part_lse, lse)]
    out = compat.autotuned(
        MERGE_NAME,
        templates()[1],
        [configs.merge_constants(call.heads, call.rank, splits)],
        inputs,
        size=[B, T, H, R],
        dtype=parts.get_dtype(),
        grid_sizes=[B * T],
        mutated=inputs[2:],
        examples={},
    )
    return out, lse


def _example(name: str, call: Call) -> Callable[[Any], Tensor]:
    """What autotuning feeds an index input: every row sees all slots and picks ascending ones, pages lie in order."""

    def example(buffer: Any) -> Tensor:
        size, device = [compat.hint(n) for n in buffer.get_size()], buffer.get_device()
        if name == "table":
            return torch.arange(size[0] * size[1], dtype=torch.int32, device=device).view(size)
        if name == "visible":
            return torch.tensor([0, call.slots], dtype=torch.int32, device=device).expand(size).contiguous()
        return torch.randint(call.slots, size, dtype=torch.int32, device=device).sort(-1).values

    return example
