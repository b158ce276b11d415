"""The kernel of ``dsa::sparse_mla`` without a GPU: rendered, compiled for Hopper, and interpreted on the CPU."""

from contextlib import nullcontext
from unittest import mock

import hopper
import pytest
import torch

from dsa_compile import lowering
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.fp8_rows import row_bytes
from dsa_compile.lowering.sparse_mla import configs, gluon
from dsa_compile.lowering.sparse_mla.configs import Call

H200 = Device(capability=(9, 0), processors=132, shared=hopper.SHARED)


def sources(B=8, T=1, H=128, R=512, P=64, K=2048, S=4096, dtype=torch.bfloat16, fp8=False, page=0, portable=True):
    """Of the kernels in a graph that calls the op; ``portable``: the one for Hopper alone does not serve."""
    lowering.register_inductor()
    width = row_bytes(R, P) if fp8 else R + P
    shapes = [
        ((B, T, H, R), dtype),
        ((B, T, H, P), dtype),
        ((B * S // page, page, width) if page else (B, S, width), torch.uint8 if fp8 else dtype),
        ((B, 1, T, 2), torch.int32),
        *([((B, T, K), torch.int32)] if K else []),
        *([((B, S // page), torch.int32)] if page else []),
    ]

    def function(q, q_pe, latent, visible, *rest):
        picks, table = rest[0] if K else None, rest[-1] if page else None
        return torch.ops.dsa.sparse_mla(q, q_pe, latent, visible, None, picks, 0.1, table)

    with mock.patch.object(gluon, "refusal", return_value="portable") if portable else nullcontext():
        return hopper.rendered(function, *shapes)


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("page", [0, 64])
def test_hopper_configurations_fit_and_spill_nothing(heads, fp8, page, tmp_path):
    every = sources(H=heads, fp8=fp8, page=page)
    call = Call(torch.bfloat16, heads, 512, 64, 2048, 4096, 8, fp8, False)
    choices = configs.configs(call, H200)
    assert len(every) == len(choices) + 1  # and the merge of the parts
    for source, choice in zip(every, choices):
        made = hopper.compiled(source, tmp_path)
        assert made.shared <= hopper.SHARED
        assert made.shared <= configs.shared_bytes(call, choice)
        assert made.stack == 0
        assert ("wgmma" in made.ptx) == (heads == 128)
    assert hopper.compiled(every[-1], tmp_path).stack == 0


@pytest.mark.parametrize(
    "case",
    [
        {"K": 0},
        {"H": 96, "T": 512, "K": 2048},
        {"H": 4, "R": 32, "P": 8, "K": 8, "dtype": torch.float32},
        {"H": 22, "R": 36, "P": 16, "K": 33, "dtype": torch.float16},
        {"H": 4, "R": 32, "P": 8, "K": 8, "fp8": True},
    ],
    ids=str,
)
def test_other_calls_compile(case, tmp_path):
    for source in sources(**case):
        assert hopper.compiled(source, tmp_path).shared <= hopper.SHARED


def test_tensor_cores_score_each_key_once(tmp_path):
    """64 heads by 64 keys on two warpgroups: each scores 32 of the keys, 4 + 32 steps of 16 values."""
    made = hopper.compiled(sources(T=64, page=64)[0], tmp_path)
    steps = [line for line in made.ptx.splitlines() if "wgmma.mma_async" in line]
    assert sum("m64n32k16" in line for line in steps) == 36
    assert sum("m64n256k16" in line for line in steps) == 4


@pytest.mark.parametrize(("rows", "parts"), [(1, 32), (8, 8), (64, 1), (128, 1), (4096, 1)])
def test_a_row_is_split_until_the_device_is_full(rows, parts):
    call = Call(torch.bfloat16, 128, 512, 64, 2048, 32768, rows, False, False)
    assert configs.splits(call, configs.configs(call, H200)[0], H200) == parts


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "torch.float64"),
        ({"masked": True}, "mask"),
        ({"rank": 513}, "kv_lora_rank <= 512"),
        ({"rope": 65}, "qk_rope_head_dim <= 64"),
        ({}, None),
    ],
)
def test_refusals_name_the_limit(change, reason):
    call = Call(**{**vars(Call(torch.bfloat16, 8, 512, 64, 64, 100, 1, False, False)), **change})
    refused = configs.refusal(call)
    assert refused is None if reason is None else reason in refused


PROGRAM = """
import torch
from dsa_compile import lowering
from dsa_compile.lowering import fp8_rows
from dsa_compile.lowering.sparse_mla import launch
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.sparse_mla.configs import Config
from dsa_compile.lowering.sparse_mla.reference import sparse_mla

B, T, S = 2, 3, 50
torch.manual_seed(0)
visible = torch.tensor([[0, S], [2, S - 1], [3, 3]]).int().expand(B, 1, T, 2).contiguous()
for H, R, P, K, splits, fp8, page, dtype in [
    (4, 32, 8, 8, 1, False, 0, torch.float32),
    (22, 36, 8, 33, 3, False, 7, torch.float32),
    (22, 36, 8, None, 3, False, 0, torch.float32),
    (4, 160, 8, 20, 2, True, 0, torch.float32),
    (4, 512, 64, 40, 2, True, 16, torch.float32),
    (17, 64, 16, 8, 2, False, 0, torch.float16),
]:
    q, q_pe, rows = (torch.randn(shape, dtype=dtype) for shape in ((B, T, H, R), (B, T, H, P), (B, S, R + P)))
    q *= R**-0.5
    picks = None if K is None else torch.randint(-2, S + 3, (B, T, K)).int()
    if K is not None:
        picks[0, 0], picks[1, 1, : K // 2] = -1, 2**31 - 1
    pool = fp8_rows.pack(rows[..., :R], rows[..., R:]) if fp8 else rows
    values = fp8_rows.unpack(pool, R, P, dtype) if fp8 else rows
    table = None
    if page:
        pages = -(-S // page)
        table = torch.randperm(B * pages).view(B, pages).int()
        whole = torch.full((B * pages, page, pool.shape[-1]), 255 if fp8 else float("nan")).to(pool.dtype)
        for b in range(B):
            for p in range(pages):
                part = pool[b, p * page : (p + 1) * page]
                whole[table[b, p], : len(part)] = part
        pool = whole
    device = Device((9, 0), 132, 232448)
    out, lse = launch.launch(q, q_pe, pool, visible, picks, 0.3, table, Config(16, 16, 4, 1), device, splits)
    exact, exact_lse = sparse_mla(q.double(), q_pe.double(), values.double(), visible, None, picks, 0.3)
    error = (out - exact).norm() / exact.norm()
    assert error < (1e-6 if dtype == torch.float32 else 2e-3), (H, R, K, error)
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    assert not out[exact_lse.isneginf()].any()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=0)
    print("right", H, R, K)
"""


def test_the_mathematics_equals_the_reference(tmp_path):
    assert hopper.interpreted(PROGRAM, tmp_path).count("right") == 6
