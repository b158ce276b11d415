"""The Triton kernels of few rows' products, compiled for Hopper and interpreted on the CPU."""

import hopper
import pytest
import torch

from dsa_compile.lowering.row_products.launch import config
from dsa_compile.lowering.row_products.limits import MOST_ROWS

PROGRAM = """
import torch
from dsa_compile import lowering
from dsa_compile.lowering.row_products.launch import expert_products_cuda, row_products_cuda
from dsa_compile.lowering.row_products.reference import expert_products, row_products

torch.manual_seed(0)
for sizes, K, dtype in [((3, 8, 1, 5), 1300, torch.float32), ((7,), 4100, torch.bfloat16), ((2, 3), 64, torch.float16)]:
    weights = [torch.randn(N, K).to(dtype) for N in sizes]
    for rows, wanted in [(1, None), (2, torch.float32), (3, None)]:
        x = torch.randn(rows, K).to(dtype)
        want = row_products(x.double(), [w.double() for w in weights])
        got = row_products_cuda(x, weights, wanted)
        torch.testing.assert_close(got, want.to(wanted or dtype), rtol=2e-2, atol=2e-2 * K**0.5)
    parts = torch.randn(K // 4, 2, 4).to(dtype).transpose(0, 1)
    want = row_products(parts.double(), [w.double() for w in weights])
    torch.testing.assert_close(row_products_cuda(parts, weights), want.to(dtype), rtol=2e-2, atol=2e-2 * K**0.5)
    experts, picks = torch.randn(3, 5, K).to(dtype), torch.tensor([2, -1, 0, 3])
    for rows in (1, 2, 4):
        x = torch.randn(rows, K).to(dtype)
        want = expert_products(x.double(), experts.double(), picks)
        got = expert_products_cuda(x, experts, picks)
        torch.testing.assert_close(got, want.to(dtype), rtol=2e-2, atol=2e-2 * K**0.5)
print("equal")
"""
POINTERS = {**dict.fromkeys(["X", "OUT", "W", "W0", "W1", "W2", "W3"], "*bf16"), "PICKS": "*i64"}
gpu = torch.cuda.is_available()


@pytest.mark.skipif(gpu, reason="the tests of the ops run the kernels")
def test_interpreted_kernels_equal_the_references(tmp_path):
    assert "equal" in hopper.interpreted(PROGRAM, tmp_path)


@pytest.mark.skipif(gpu, reason="compiled for a GPU that is not there")
@pytest.mark.parametrize("K", [1536, 7168])
@pytest.mark.parametrize("most", [1, 2, MOST_ROWS])
def test_first_weights_are_asked_for_before_the_wait(K, most, tmp_path):
    from dsa_compile.lowering.row_products import kernel

    tile = config(K, 2, most)
    sizes = {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "EVEN": True, "DEPENDENT": True}
    options = {"num_warps": tile.num_warps, "launch_pdl": True}
    options |= {"maxnreg": tile.registers} if tile.registers else {}
    rows, experts = (
        hopper.compiled_kernel(which, POINTERS, chosen, tmp_path, multiples=["N", "K"], **options)
        for which, chosen in (
            (kernel.row_kernel, sizes | {"ROWS": most, "PART": 128 if most > 1 else 0}),
            (kernel.expert_kernel, sizes),
        )
    )
    for made in (rows, experts):
        assert made.stack == 0
        assert made.registers <= 128
    loads, picked = (made.ptx.split("griddepcontrol.wait")[0].count("ld.global") for made in (rows, experts))
    assert loads == tile.block_n * tile.block_k * 2 // (tile.num_warps * 32 * 16)
    assert picked == 0
    for made in (rows, experts):
        before, behind = made.ptx.split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" not in before, "a successor may read what came before this kernel"
        assert "griddepcontrol.launch_dependents" in behind
