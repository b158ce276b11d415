"""The Triton kernel of routing, compiled for Hopper and interpreted on the CPU."""

import hopper
import pytest
import torch

from dsa_compile.lowering.route.limits import power_of_two

PROGRAM = """
import torch
from dsa_compile import lowering
from dsa_compile.lowering.route.launch import route_cuda
from dsa_compile.lowering.route.reference import route

torch.manual_seed(0)
for E, groups, topk_groups, topk in [(8, 2, 1, 4), (12, 3, 2, 5), (12, 3, 3, 3), (20, 1, 1, 6)]:
    logits, bias = torch.randn(6, E), torch.randn(E) / 8
    logits[1, 3:5] = float("nan")
    logits[2] = float("nan")
    logits[3] = 0
    bias[:2] = float("-inf")
    bias[6:] = bias[6:].round()
    for normalise in (True, False):
        want = route(logits, bias, groups, topk_groups, topk, normalise, 2.5)
        got = route_cuda(logits, bias, groups, topk_groups, topk, normalise, 2.5)
        torch.testing.assert_close(got[0], want[0], equal_nan=True)
        assert torch.equal(got[1], want[1]), (got[1], want[1])
print("equal")
"""
POINTERS = {"LOGITS": "*fp32", "BIAS": "*fp32", "WEIGHTS": "*fp32", "EXPERTS": "*i64"}
gpu = torch.cuda.is_available()


@pytest.mark.skipif(gpu, reason="the tests of the op run the kernel")
def test_the_interpreted_kernel_equals_the_reference(tmp_path):
    assert "equal" in hopper.interpreted(PROGRAM, tmp_path)


@pytest.mark.skipif(gpu, reason="compiled for a GPU that is not there")
@pytest.mark.parametrize(("experts", "groups", "topk_groups"), [(256, 8, 4), (384, 1, 1), (1024, 1, 1)])
def test_a_program_is_one_warp_without_a_spill_or_a_barrier(experts, groups, topk_groups, tmp_path):
    from dsa_compile.lowering.route import kernel

    sizes = {"E": experts, "GROUPS": groups, "TOPK_GROUPS": topk_groups, "TOPK": 8, "NORMALISE": True}
    blocks = {"BLOCK_GROUPS": power_of_two(groups), "BLOCK_EXPERTS": power_of_two(experts // groups), "BLOCK_TOPK": 8}
    made = hopper.compiled_kernel(
        kernel.route_kernel, POINTERS, sizes | blocks | {"DEPENDENT": True}, tmp_path, num_warps=1, launch_pdl=True
    )
    assert made.stack == 0
    assert "bar.sync" not in made.ptx
    hopper.waits_first(made)
