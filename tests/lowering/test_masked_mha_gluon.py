"""The masked kernel for Hopper without a GPU: compiled, and chosen for what it can serve."""

import re
import sys

import hopper
import pytest
import torch
from cases import V32
from test_masked_mha import GLM, H200, TINY

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.masked_mha import configs, gluon
from dsa_compile.lowering.masked_mha.launch import config_of


def test_it_compiles_for_hopper_and_spills_nothing(tmp_path):
    from dsa_compile.lowering.masked_mha import gluon_kernel as kernel

    rows = {"EXPANDED": "bf16[128, 128]", "K_PE": "bf16[128, 64]"}
    pointers = {name: f"tensordesc<{block},{kernel.LINES.value!r}>" for name, block in rows.items()}
    pointers |= {"Q": "*bf16", "OUT": "*bf16"} | dict.fromkeys(("WORDS_OF_BITS", "BLOCKS", "COUNTS"), "*i32")
    made = hopper.compiled_kernel(kernel.attend_masked_kernel, pointers, {}, tmp_path, num_warps=4)
    assert made.stack == 0
    assert made.shared <= hopper.SHARED
    assert made.registers * 384 <= 64 << 10
    lines = made.ptx.splitlines()
    steps = [line for line in lines if "wgmma.mma_async" in line]
    assert len(steps) == sum("m64n128k16" in line for line in steps) == 2 * 2 * (4 + 8 + 8)
    assert sum("cp.async.bulk.tensor" in line for line in lines) == 3
    assert sum("ld.global.v4" in line for line in lines) == 2 * 3 * 2, "a row's words of a block are read at once"
    scored, mixed = (rf"wgmma.wait_group.sync.aligned\s+{n};" for n in (1, 0))
    between = [re.split(mixed, part)[0] for part in re.split(scored, made.ptx)[1:]]
    assert [part.count("ex2.approx") for part in between] == [66, 66], "weights are made while values are mixed"


@pytest.mark.parametrize(
    ("dims", "dtype", "scale", "device", "reason"),
    [
        (V32, torch.bfloat16, 0.1, Device((10, 0), 132, hopper.SHARED), "compute capability 9.0, the device has 10.0"),
        (V32, torch.float32, 0.1, H200, "it multiplies 16-bit floats, came torch.float32"),
        (GLM, torch.bfloat16, 0.1, H200, "it takes heads of 128 + 64 and 128 values, came 192 + 64 and 256"),
        (V32, torch.bfloat16, -1.0, H200, "by a number above 0, came -1.0"),
        (V32, torch.bfloat16, float("nan"), H200, "by a number above 0, came nan"),
        (V32, torch.float16, 0.1, H200, None),
    ],
    ids=str,
)
def test_refusals_name_the_limit(dims, dtype, scale, device, reason):
    refused = gluon.refusal(dims, dtype, scale, device)
    assert refused is None if reason is None else reason in refused


def test_other_calls_run_the_portable_kernel(monkeypatch, recwarn):
    assert config_of(V32, torch.bfloat16, 0.1, H200) is gluon.CONFIG
    assert config_of(TINY, torch.bfloat16, 0.1, H200) == configs.config(TINY, torch.bfloat16, H200)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    monkeypatch.delitem(sys.modules, "dsa_compile.lowering.masked_mha.gluon_kernel", raising=False)
    monkeypatch.delattr("dsa_compile.lowering.masked_mha.gluon_kernel", raising=False)
    gluon.available.cache_clear()
    assert config_of(V32, torch.bfloat16, 0.1, H200) == configs.config(V32, torch.bfloat16, H200)
    gluon.available.cache_clear()
    (warning,) = [w for w in recwarn if "dsa::prefill_mla" in str(w.message)]
    assert "runs as its portable Triton kernel, not as the faster one for Hopper" in str(warning.message)
