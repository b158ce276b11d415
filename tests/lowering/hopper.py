"""A Hopper GPU that is not there: Inductor renders for it, Triton compiles for it."""

import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
import torch.utils._triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config, select_algorithm
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

SHARED = 227 * 1024
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    type="cuda",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=141 << 30,
    shared_memory_per_block_optin=SHARED,
    shared_memory_per_multiprocessor=228 * 1024,
    gcnArchName="",
    L2_cache_size=50 << 20,
)


@contextmanager
def pretended():
    """torch believes that there is one."""
    with ExitStack() as stack:

        def patch(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value))

        def properties(*args, **kwargs):
            return PROPERTIES

        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "device_count", lambda: 1)
        patch(torch.cuda, "current_device", lambda: 0)
        patch(torch.cuda, "get_device_properties", properties)
        patch(torch.cuda, "get_device_capability", lambda *args: (9, 0))
        patch(torch.cuda, "is_tf32_supported", lambda: True)
        patch(torch.cuda, "synchronize", lambda *args: None)
        patch(CudaInterface, "is_available", staticmethod(lambda: True))
        patch(CudaInterface, "get_device_properties", staticmethod(properties))
        patch(CudaInterface, "get_compute_capability", staticmethod(lambda *args, **kwargs: 90))
        patch(CudaInterface.Worker, "get_device_properties", staticmethod(properties))
        patch(CudaInterface.Worker, "current_device", staticmethod(lambda: 0))
        patch(torch.utils._triton, "triton_hash_with_backend", lambda *args: "none")
        yield


def rendered(function, *shapes):
    """Sources of the templates that Inductor renders for ``function`` of tensors of (size, dtype), all choices."""
    sources = []

    def record(cls, source, *args, **kwargs):
        sources.append(source)
        return SimpleNamespace(__file__="", key="")

    def first(name, choices, *args, **kwargs):
        return choices[0].output_node()

    with FakeTensorMode() as fake:
        inputs = [torch.empty(size, dtype=dtype, device="cuda") for size, dtype in shapes]
        graph = GraphLowering(make_fx(function)(*inputs), inputs)
    with (
        pretended(),
        V.set_fake_mode(fake),
        V.set_graph_handler(graph),
        config.patch(force_disable_caches=True, compile_threads=1),
        mock.patch.object(select_algorithm, "autotune_select_algorithm", first),
        mock.patch.object(select_algorithm.PyCodeCache, "load", classmethod(record)),
    ):
        graph.run(*inputs)
    return sources


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes. ``stack``: bytes of registers spilled a thread."""

    registers: int
    stack: int
    shared: int
    ptx: str


def compiled(source, folder):
    """A rendered template, compiled by Triton for sm_90."""
    from triton.compiler import ASTSource

    meta = re.search(r"triton_meta=(\{.*\}),\ninductor_meta", source, re.DOTALL)[1]
    meta = eval(meta, {"DeviceProperties": lambda **kwargs: None})
    warps, stages = (int(re.search(rf"num_{what}=(\d+)", source)[1]) for what in ("warps", "stages"))
    plain = re.sub(r"@triton_heuristics\.template\(.*?\n\)\n", "", source, count=1, flags=re.DOTALL)
    path = Path(folder) / f"rendered_{abs(hash(source))}.py"
    path.write_text(plain)
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = next(v for k, v in vars(module).items() if k.startswith("triton_dsa"))
    source = ASTSource(kernel, dict(meta["signature"]), dict(meta["constants"]), meta["configs"][0])
    return _compiled(source, folder, num_warps=warps, num_stages=stages)


def compiled_kernel(kernel, pointers, constants, folder, multiples=(), **options):
    """A kernel in Triton or Gluon, compiled for sm_90.

    ``pointers``: their types by name, of this kernel and others. What is neither that nor constant is an int32, or a
    float32 if named ``scale``; pointers, ``multiples`` and what is called a stride are multiples of 16.
    """
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kinds = {"scale": "fp32"} | pointers | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = [
        i for i, name in enumerate(kernel.arg_names) if name in pointers or name in multiples or "stride" in name
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return _compiled(source(kernel, signature, constants, attributes), folder, **options)


def waits_first(made):
    """A kernel that is launched as a dependent one touches no memory before its predecessor has ended."""
    assert made.ptx.count("griddepcontrol.wait") == 1
    before = made.ptx[: made.ptx.index("griddepcontrol.wait")]
    assert not re.search(r"(ld|st|prefetch)\.global", before)


def _compiled(source, folder, **options):
    import triton
    from triton.backends.compiler import GPUTarget

    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", dir=folder) as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups())
    return Compiled(registers, stack, made.metadata.shared, made.asm["ptx"])


def interpreted(program, folder):
    """Run a program under Triton's interpreter, in a process of its own: the switch is read at import."""
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 fails on loops with numpy 2.4 and later")
    path = Path(folder) / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
