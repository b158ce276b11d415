"""Attention over expanded keys under a mask of bits without a GPU: compiled for Hopper, and interpreted on the CPU."""

import hopper
import pytest
import torch
from cases import V32

from dsa_compile.dims import LayerDims
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.masked_mha import configs

H200 = Device(capability=(9, 0), processors=132, shared=hopper.SHARED)
AMPERE = Device(capability=(8, 0), processors=108, shared=163 * 1024)
GLM = LayerDims(n_heads=64, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
TINY = LayerDims(n_heads=3, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
VALUES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def compiled(dims, dtype, folder):
    from dsa_compile.lowering.masked_mha import kernel

    config = configs.config(dims, dtype, H200)
    constants = config.constants(dims)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    pointers = dict.fromkeys(("Q", "KEY", "K_PE", "VALUE", "OUT"), VALUES[dtype])
    pointers |= dict.fromkeys(("BITS", "BLOCKS", "COUNTS"), "*i32")
    return config, hopper.compiled_kernel(kernel.attend_masked_kernel, pointers, constants, folder, **options)


@pytest.mark.parametrize("dims", [V32, GLM], ids=["DeepSeek-V3.2", "GLM-5"])
def test_it_compiles_for_hopper_and_spills_nothing(dims, tmp_path):
    config, made = compiled(dims, torch.bfloat16, tmp_path)
    assert made.stack == 0
    assert made.shared <= min(hopper.SHARED, configs.shared_bytes(dims, torch.bfloat16, config))
    assert made.registers * 32 * config.warps <= 64 << 10
    steps = [line for line in made.ptx.splitlines() if "wgmma.mma_async" in line]
    assert sum(f"n{config.keys}k16" in line for line in steps) >= configs.block(dims.qk_nope_head_dim) // 16
    assert "mma.sync" not in made.ptx


def test_bits_stay_in_registers(tmp_path):
    """What is stored to shared memory is queries and outputs, before and behind the loop."""
    _, made = compiled(V32, torch.bfloat16, tmp_path)
    loop = made.ptx[made.ptx.index("wgmma.mma_async") : made.ptx.rindex("wgmma.mma_async")]
    assert "st.shared" not in loop


def test_float32_compiles(tmp_path):
    assert compiled(TINY, torch.float32, tmp_path)[1].shared <= hopper.SHARED


@pytest.mark.parametrize(
    ("dims", "dtype", "device"),
    [
        (V32, torch.bfloat16, AMPERE),
        (GLM, torch.float16, AMPERE),
        (GLM, torch.float32, H200),
        (TINY, torch.float32, AMPERE),
    ],
)
def test_a_configuration_fits_every_device(dims, dtype, device):
    assert configs.shared_bytes(dims, dtype, configs.config(dims, dtype, device)) <= device.shared


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({}, torch.float64, "it computes in float32 at most, the queries are torch.float64"),
        ({"qk_nope_head_dim": 257}, torch.bfloat16, "its tiles hold qk_nope_head_dim <= 256"),
        ({"qk_rope_head_dim": 128}, torch.bfloat16, "came 128, 128 and 128"),
        ({"v_head_dim": 512}, torch.bfloat16, "v_head_dim <= 256, came 128, 64 and 512"),
        ({}, torch.float16, None),
    ],
    ids=str,
)
def test_refusals_name_the_limit(change, dtype, reason):
    refused = configs.refusal(LayerDims(**{**vars(V32), **change}), dtype)
    assert refused is None if reason is None else reason in refused


@pytest.mark.parametrize(
    ("rows", "slots", "heads"), [(4096, 8192, 128), (4096, 1 << 17, 17), (1, 1 << 17, 1), (64, 0, 128)]
)
def test_heads_are_expanded_in_the_memory_of_the_absorbed_form(rows, slots, heads):
    assert configs.heads_at_once(V32, rows, slots) == heads
    absorbed = 128 * rows * (2 * 512 + 64)
    assert heads == 1 or heads * slots * 256 <= absorbed


PROGRAM = """
import torch
from dsa_compile import lowering
from dsa_compile.dims import LayerDims
from dsa_compile.lowering.masked_mha import configs, launch
from dsa_compile.lowering.masked_mha.configs import Config
from dsa_compile.lowering.prefill_mla.reference import expanded

torch.manual_seed(0)
for B, H, T, S, N, P, V, K, config, dtype in [
    (2, 3, 20, 70, 16, 8, 16, 20, Config(16, 32, 4, 1), torch.float32),
    (1, 2, 33, 130, 24, 16, 20, 40, Config(32, 64, 4, 1), torch.float32),
    (2, 2, 18, 70, 5, 4, 6, None, Config(16, 32, 4, 1), torch.float32),
    (1, 2, 17, 33, 16, 16, 16, 8, Config(16, 32, 4, 1), torch.float16),
]:
    R = 12
    dims = LayerDims(n_heads=H, kv_lora_rank=R, qk_nope_head_dim=N, qk_rope_head_dim=P, v_head_dim=V)
    q = torch.randn(B, T, H, N + P, dtype=dtype).transpose(1, 2)
    latent, weight = torch.randn(B, S, R + P, dtype=dtype), torch.randn(H * (N + V), R, dtype=dtype) * R**-0.5
    visible = torch.stack([torch.randint(-3, 9, (B, 1, T)), torch.randint(-3, S + 9, (B, 1, T))], -1).int()
    picks = None if K is None else torch.randint(-3, S + 5, (B, T, K)).int()
    if K is not None:
        picks[0, 0], picks[-1, 1, ::2] = -1, 2**31 - 1
    latent[0, 5, 3], latent[-1, 7, R + 1] = float("nan"), float("inf")
    exact = expanded(q.double(), latent.double(), weight.double(), visible, picks, N, 0.3)
    for configs.BITS_BUDGET, heads in ((1 << 20, H), (B * S, 1)):
        configs.heads_at_once = lambda *_: heads
        out = launch.masked_mha(q, latent, weight, visible, picks, 0.3, dims, config)
        assert torch.equal(out.isnan(), exact.isnan())
        assert 0 < exact.isnan().sum() < exact.numel() and (exact == 0).all(-1).any()
        error = (out - exact).nan_to_num(0).norm() / exact.nan_to_num(0).norm()
        assert error < (1e-6 if dtype == torch.float32 else 2e-3), error
        assert not out[(exact == 0).all(-1)].any()
        print("right")
"""


def test_the_mathematics_equals_the_reference(tmp_path):
    """Rows in parts and heads in groups; NaN reaches the rows that attend to it, and empty rows are zeros."""
    assert hopper.interpreted(PROGRAM, tmp_path).count("right") == 8


BLOCKS = """
import torch
from dsa_compile.lowering.masked_mha import launch
from dsa_compile.lowering.masked_mha.configs import Config

picks = torch.full((2, 40, 3), -1, dtype=torch.int32)
picks[0, 0], picks[0, 17, 1], picks[1, 39, 0] = torch.tensor([0, 33, 64]), 640, 511
bits, blocks, counts = launch._mask(torch.zeros(2, 1, 40, 1), None, picks, 650, Config(16, 32, 4, 1))
assert counts.tolist() == [3, 1, 0, 0, 0, 1]
assert [blocks[tile, : counts[tile]].tolist() for tile in (0, 1, 5)] == [[0, 1, 2], [20], [15]]
assert bits[0, 0, :3].tolist() == [1, 2, 1] and bits[1, 39, 15] == -(2**31)
print("right")
"""


def test_a_tile_visits_the_blocks_that_its_rows_want(tmp_path):
    assert hopper.interpreted(BLOCKS, tmp_path) == "right\n"
