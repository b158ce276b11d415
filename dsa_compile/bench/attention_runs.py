"""What is timed as sparse MLA attention, in which configuration it runs, and a peer."""

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsa_compile.lowering
from dsa_compile.bench.attention_cases import SCALE, AttentionCase, Inputs
from dsa_compile.bench.attention_check import checked
from dsa_compile.bench.harness import Peer
from dsa_compile.bench.table import described
from dsa_compile.bench.timing import Gpu, Launch, Recording
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.sparse_mla import configs, gluon, launch

UNSERVED = "reference, no kernel"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def op(q_absorbed: Tensor, q_pe: Tensor, latent: Tensor, visible: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, latent, visible, None, picks, SCALE)
    return out, lse


def record(case: AttentionCase, sets: Sequence[Inputs], gpu: Gpu, *, lowering: str) -> tuple[Recording, dict[str, Any]]:
    """`op` as it stands (``"eager"``) or by Inductor, and the kernel and configuration that it runs in."""
    with fresh_caches() as folder:
        recording = gpu.record(op if lowering == "eager" else compiled(), sets)
        picked = inductor_configuration(folder) or eager_configuration(sets[0])
    return recording, {"configuration": picked}


def compiled() -> Launch:
    """`op` by Inductor, with nothing left of what was compiled before."""
    dsa_compile.lowering.register_inductor()
    torch.compiler.reset()
    made: Launch = torch.compile(op, fullgraph=True, dynamic=False)
    return made


@contextmanager
def fresh_caches() -> Iterator[Path]:
    """An empty folder for what Inductor and Triton write.

    What they kept of an earlier run may be of another kernel: a template's key holds its own text alone.
    """
    before = {name: os.environ.pop(name, None) for name in CACHES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update(zip(CACHES, (folder, f"{folder}/triton")))
        try:
            yield Path(folder)
        finally:
            for name in CACHES:
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in before.items() if value is not None})


def eager_configuration(inputs: Inputs) -> str:
    """What `launch.sparse_mla_cuda` takes for a call."""
    q, q_pe, pool, _, picks = inputs
    call = launch.call_of(q, q_pe, pool, None, picks, None)
    if not q.is_cuda or configs.refusal(call) is not None:
        return UNSERVED
    device = Device.of(q.device)
    hopper = gluon.refusal(call, device, False, SCALE) is None and gluon.aligned(q, q_pe, pool)
    kernel, config = ("Gluon", gluon.CONFIG) if hopper else ("Triton", configs.configs(call, device)[0])
    splits = configs.splits(call, config, device)
    return f"{kernel}, {described(config.heads, config.keys, config.warps, config.stages, splits)}"


def inductor_configuration(folder: Path) -> str | None:
    """The template that Inductor chose, read from the graph's code in its cache; None: the graph calls the op."""
    for path in folder.rglob("*.py"):
        for kernel in path.read_text().split("async_compile.triton(")[1:]:
            sizes = [re.search(rf"\b{n} : tl\.constexpr = (\d+)", kernel) for n in ("BLOCK_H", "BLOCK_N", "SPLITS")]
            options = [re.search(rf"\b{name}=(\d+)", kernel) for name in ("num_warps", "num_stages")]
            found = [int(match[1]) for match in (*sizes, *options) if match is not None]
            if len(found) == len(sizes) + len(options):
                heads, keys, splits, warps, stages = found
                return f"Triton, {described(heads, keys, warps, stages, splits)}"
    return None


def flash_mla(case: AttentionCase) -> list[Peer[AttentionCase]]:
    """FlashMLA's sparse prefill, if it is installed and the case is one."""
    if case.fp8 or case.batch > 1 or case.queries == 1 or importlib.util.find_spec("flash_mla") is None:
        return []

    def arguments(inputs: Inputs) -> tuple[Any, ...]:
        q, q_pe, pool, _, picks = inputs
        return torch.cat([q, q_pe], -1)[0], pool[0].unsqueeze(1), picks[0].unsqueeze(1)

    def call(q: Tensor, latent: Tensor, picks: Tensor) -> tuple[Tensor]:
        from flash_mla import flash_mla_sparse_fwd

        return (flash_mla_sparse_fwd(q, latent, picks, SCALE)[0].unsqueeze(0),)

    return [Peer("flash_mla", call, checked, arguments)]
