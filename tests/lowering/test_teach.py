"""Teaching without a GPU: what is refused, how rows are cut, what compiles, and the kernels under the interpreter."""

from dataclasses import replace

import hopper
import pytest
import torch

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.teach import configs, launch
from dsa_compile.lowering.teach.configs import Call

H200 = Device((9, 0), 132, hopper.SHARED)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
V3 = Call(BF16, BF16, 128, 128, 64, 128, 64, 128, 1, 4096)
TINYSEEK = Call(FP32, FP32, 8, 32, 32, 64, 16, 64, 4, 4096)
KINDS = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "they compute in float32 at most, came torch.float64"),
        ({"index_dtype": torch.float64}, "they compute in float32 at most, came torch.float64"),
        ({"nope": 257}, "their tiles hold qk_nope <= 256, qk_rope <= 64 and v_head_dim <= 256, came 257, 64 and 128"),
        ({"rope": 80}, "came 128, 80 and 128"),
        ({"value": 300}, "came 128, 64 and 300"),
        ({"index_heads": 129}, "their tiles hold index_n_heads <= 128 and index_head_dim <= 128, came 129 and 128"),
        ({"index_dim": 256}, "came 64 and 256"),
        ({}, None),
    ],
    ids=str,
)
def test_refusals_name_the_limit(change, reason):
    refused = configs.refusal(replace(V3, **change), H200)
    assert refused is None if reason is None else reason in refused


def test_a_device_of_little_shared_memory_is_refused():
    assert "163840 bytes of shared memory, this device has 101376" in configs.refusal(V3, Device((8, 6), 84, 99 << 10))
    assert configs.refusal(V3, Device((8, 0), 108, 166912)) is None


@pytest.mark.parametrize("allowed", [True, False])
def test_float32_is_multiplied_as_torch_is_told_to(allowed, allow_tf32):
    allow_tf32(allowed)
    made = configs.tiles(TINYSEEK, H200)
    precisions = [f(TINYSEEK, made.rows)["PRECISION"] for f in (configs.attend_constants, configs.row_constants)]
    assert {made.scores.precision, *precisions} == {"tf32" if allowed else "tf32x3"}


@pytest.mark.parametrize("most", [1, 300, 700, 5000])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 300), (2, 1000)])
def test_chunks_cover_every_row_once_and_no_more_than_fit(batch, tokens, most):
    parts = list(launch.chunks(batch, tokens, most))
    rows = [(b, t) for s, r in parts for b in range(s.start, s.stop) for t in range(r.start, r.stop)]
    assert rows == [(b, t) for b in range(batch) for t in range(tokens)]
    assert all((s.stop - s.start) * (r.stop - r.start) <= max(most, 128) for s, r in parts)
    assert all(r.start % 128 == 0 for _, r in parts)


@pytest.mark.parametrize(("batch", "tokens", "shares"), [(1, 4096, 9), (4, 4096, 3), (64, 4096, 1), (1, 100, 2)])
def test_rows_are_dealt_out_until_the_device_is_full(batch, tokens, shares):
    call = replace(V3, batch=batch, tokens=tokens)
    assert configs.splits(call, configs.tiles(call, H200).columns, batch, tokens, H200.processors) == shares


def compile_for(name, call, folder, selected=False):
    from dsa_compile.lowering.teach import student_kernel, teacher_kernel

    values, index_values = KINDS[call.dtype], KINDS[call.index_dtype]
    teacher = dict.fromkeys(("Q", "KV", "K_PE", "OUT"), values) | {"KEEP": "*u8"}
    student = dict.fromkeys(("Q", "KEYS", "Q_GRAD"), index_values)
    floats = dict.fromkeys(("LSE", "TARGET", "SCORES", "LOSS", "WEIGHTS", "GRAD", "WEIGHTS_GRAD", "PARTS"), "*fp32")
    tiles = configs.tiles(call, H200)
    kernel, pointers, sizes = {
        "attend": (teacher_kernel.attend, teacher, configs.attend_constants(call, tiles.attend)),
        "target": (teacher_kernel.target, teacher, configs.target_constants(call, tiles.target)),
        "diverge": (
            student_kernel.diverge,
            {"KEEP": "*u8"},
            {"FLAT": selected, "BLOCK": launch.LANES, "num_warps": 4, "num_stages": 1},
        ),
        "rows": (student_kernel.row_gradients, student, configs.row_constants(call, tiles.rows)),
        "columns": (student_kernel.column_gradients, student, configs.column_constants(call, tiles.columns)),
    }[name]
    options = {option: sizes.pop(option) for option in ("num_warps", "num_stages")}
    sizes |= {"SELECTED": selected} if name in ("attend", "diverge") else {}
    return hopper.compiled_kernel(kernel, floats | {"VISIBLE": "*i32"} | pointers, sizes, folder, **options)


@pytest.mark.parametrize("name", ["attend", "target", "diverge", "rows", "columns"])
def test_measured_tiles_spill_nothing_and_use_tensor_cores(name, tmp_path):
    made = compile_for(name, V3, tmp_path)
    assert made.stack == 0
    assert made.shared <= hopper.SHARED
    assert ("wgmma.mma_async" in made.ptx) == (name != "diverge")


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        replace(V3, dtype=FP16, index_dtype=FP16, index_heads=32),
        replace(V3, index_heads=128),
        replace(V3, nope=192, value=256),
        TINYSEEK,
        replace(V3, dtype=FP32, index_dtype=FP32),
        replace(V3, nope=192, value=256, dtype=FP32),
        replace(V3, nope=80, rope=48, value=72, index_heads=22, index_dim=48),
    ],
    ids=str,
)
@pytest.mark.parametrize("tf32", [True, False])
def test_other_calls_compile(call, tf32, tmp_path, allow_tf32):
    allow_tf32(tf32)
    for name in ("attend", "target", "diverge", "rows", "columns"):
        made = compile_for(name, call, tmp_path, selected=True)
        assert made.shared <= hopper.SHARED
        assert made.stack == 0 or call.dtype == FP32


PROGRAM = """
import torch
from dsa_compile import lowering
from dsa_compile.lowering.select.configs import Config
from dsa_compile.lowering.teach import launch, teach
from dsa_compile.lowering.teach.configs import Tile, Tiles

torch.manual_seed(0)
tile = Tile(16, 16, 4, 1)
tiles = Tiles(tile, tile, Config(16, 16, 4, 1), tile, tile)
for B, H, T, N, P, R, V, HI, DI, K, most, temperature in [
    (2, 2, 37, 12, 4, 5, 8, 3, 12, None, 40, 2.0),
    (1, 2, 140, 16, 16, 8, 16, 16, 16, 9, 1, 1.5),
    (3, 1, 20, 20, 2, 4, 20, 5, 16, None, 45, 1.0),
]:
    launch.BUDGET = 8 * -(-T // 16) * 16 * most
    q, c_kv, k_pe = torch.randn(B, H, T, N + P), torch.randn(B, T, R), torch.randn(B, T, P)
    weight = torch.randn(H * (N + V), R)
    visible = torch.stack([torch.zeros(T), torch.arange(1, T + 1)], -1).int().repeat(B, 1, 1, 1)
    visible[0, 0, 11:, 0] = 11
    visible[-1, 0, :, 1] = (visible[-1, 0, :, 1] - 3).clamp_min(0)
    student = torch.randn(B, T, HI, DI), torch.randn(B, T, HI), torch.randn(B, T, DI)
    topk = None if K is None else torch.randint(-1, T, (B, T, K)).int()
    if K is not None:
        topk[..., 0] = visible[:, 0, :, 1] - 1
    operands = q, c_kv, k_pe, weight, visible, topk, *student
    exact = (x if x is None or x.dtype == torch.int32 else x.double() for x in operands)
    wanted = teach(*exact, N, 0.3, 0.25, True, temperature)
    ours = launch.launch(*operands, N, 0.3, 0.25, True, tiles, 4, temperature)
    for x, y in zip((*ours[:2], *ours[2]), (*wanted[:2], *wanted[2]), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert len(list(launch.chunks(B, T, most))) == 2
    if K is None:
        for x in (c_kv, k_pe, student[2]):
            x[-1, T - 1] = torch.nan  # nobody sees the last slots of this sequence
        assert torch.equal(launch.launch(*operands, N, 0.3, 0.25, False, tiles, 4, temperature)[1], ours[1])
    print("right")
"""


def test_the_kernels_teach_what_the_reference_teaches(tmp_path):
    assert hopper.interpreted(PROGRAM, tmp_path).count("right") == 3
