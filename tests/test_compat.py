"""What is changed of Inductor's code."""

import re

import pytest
import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import fresh_cache, get_code

from dsa_compile import compat

WAIT = "tl.extra.cuda.gdc_wait()"


def kernels_of(step, *inputs):
    """Triton code that Inductor writes for kernels launched as dependents; on a CPU, nothing runs it."""
    torch._dynamo.reset()
    with config.patch({"cpu_backend": "triton"}), fresh_cache(), torch.no_grad():
        compiled = torch.compile(step, backend=lambda gm, x: compat.compile_fx(gm, x, compat.DEPENDENT_LAUNCHES))
        code = get_code(compiled, *inputs)[0]
    return [re.split(r"'''", kernel)[0] for kernel in re.split(r"def triton_", code)[1:]]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(TritonKernel, "_enable_pdl_codegen", staticmethod(lambda: True))
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "")


def test_kernels_that_are_launched_as_dependents_wait_before_they_touch_memory(hopper):
    def step(x, weight, slots):
        """A fill, which reads nothing, and a reduction in two loops."""
        values = torch.nn.functional.rms_norm(x, weight.shape, weight).amax(-1)
        return torch.zeros(3000).index_put((slots,), values)

    kernels = kernels_of(step, torch.randn(4, 5000), torch.randn(5000), torch.arange(4))
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.count(WAIT) == 1
        assert not re.search(r"tl\.(load|store|atomic)", kernel[: kernel.index(WAIT)])
    assert TritonKernel._handle_pdl_before_access.__module__ == TritonKernel.__module__, "for this compilation alone"
