"""The Triton kernels of ``dsa::cache_write``, interpreted on the CPU; on a GPU every test of the op runs them."""

import hopper

PROGRAM = """
import torch
from dsa_compile import lowering
from dsa_compile.lowering.cache_write.launch import cache_write_cuda
from dsa_compile.lowering.cache_write.reference import cache_write
from dsa_compile.lowering.fp8_keys import decode
from dsa_compile.lowering.fp8_rows import row_bytes

torch.manual_seed(0)
slots = torch.tensor([[3, -1, 7, 0, 11], [-1, -1, 2, 5, 1]])
table = torch.tensor([[5, 1, -1], [0, 9, 6]]).int()
for R, P, fp8, page in [(32, 8, False, 0), (36, 8, False, 4), (160, 8, True, 0), (32, 8, True, 4)]:
    c_kv, k_pe, key = torch.randn(2, 5, R), torch.randn(2, 5, P + 4)[..., 2:-2], torch.randn(2, 5, 16)
    c_kv[0, 2, 3] = float("nan")
    size = (8, page) if page else (2, 12)
    latent = torch.randint(0, 127, (*size, row_bytes(R, P))).byte() if fp8 else torch.randn(*size, R + P)
    pools = latent, torch.randn(*size, 16)
    ours, theirs = ([pool.clone() for pool in pools] for _ in range(2))
    for write, into in ((cache_write_cuda, ours), (cache_write, theirs)):
        write(*into, slots, c_kv, k_pe, key, table if page else None)
    assert torch.equal(ours[1], theirs[1])
    if fp8:  # the interpreter rounds to e4m3 and bf16 in ways of its own; scales are integers to it
        scales = slice(R, R + 4 * -(-R // 128))
        assert torch.equal(ours[0][..., scales], theirs[0][..., scales])
        assert torch.equal((ours[0] != latent).any(-1), (theirs[0] != latent).any(-1))
    else:
        assert torch.equal(ours[0].isnan(), theirs[0].isnan())
        assert torch.equal(ours[0].nan_to_num(), theirs[0].nan_to_num())
    print("right")

every = decode(torch.arange(256).byte(), torch.float32)
every = every[every.isfinite()]
for width, page, dtype in [(16, 0, torch.float32), (48, 4, torch.float32), (128, 0, torch.bfloat16)]:
    # values that fp8 holds, for the interpreter rounds others in ways of its own
    key = every[torch.randint(len(every), (2, 5, width + 4))].masked_fill(torch.rand(2, 5, width + 4) < 0.1, 448)
    key = (key * 2.0 ** torch.randint(-9, 9, (2, 5, 1))).to(dtype)[..., 2:-2]
    key[0, 2, 3], key[0, 3], key[0, 4, 1] = float("nan"), 0, float("-inf")
    size = (8, page) if page else (2, 12)
    pools = torch.zeros(*size, 40), torch.randint(0, 127, (*size, width)).byte(), torch.rand(size)
    ours, theirs = ([pool.clone() for pool in pools] for _ in range(2))
    for write, (latent, codes, scales) in ((cache_write_cuda, ours), (cache_write, theirs)):
        write(latent, codes, slots, None, None, key, table if page else None, scales)
    assert all(torch.equal(one.nan_to_num(7), two.nan_to_num(7)) for one, two in zip(ours, theirs))
    assert ours[2].isnan().sum() == (1 if page else 2) and not torch.equal(ours[1], pools[1])
    print("quantised")
"""


def test_rows_land_where_the_reference_puts_them(tmp_path):
    said = hopper.interpreted(PROGRAM, tmp_path)
    assert (said.count("right"), said.count("quantised")) == (4, 3)
