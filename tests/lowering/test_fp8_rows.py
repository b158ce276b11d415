"""What a row in fp8 is, byte by byte, and what comes back from it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from dsa_compile import lowering  # noqa: F401 (registers the ops)
from dsa_compile.errors import CacheError, InputError
from dsa_compile.lowering.fp8_rows import pack, row_bytes, unpack

TILE, LARGEST, SMALLEST_PEAK = 128, 448, 1e-4


def values(device, rank, rope, *, seed=0, rows=3, spread=0.0, dtype=torch.float32):
    """c_kv [2, rows, R] whose rows are ``10 ** spread`` apart, and k_pe [2, rows, P]."""
    generator = torch.Generator().manual_seed(seed)
    c_kv = torch.randn(2, rows, rank, generator=generator)
    c_kv *= 10 ** (spread * torch.randn(2, rows, 1, generator=generator))
    return c_kv.to(device, dtype), torch.randn(2, rows, rope, generator=generator).to(device, dtype)


def by_tile(x):
    return x.split(TILE, -1)


@pytest.mark.parametrize(("rank", "rope", "size"), [(512, 64, 656), (32, 8, 52), (132, 2, 144), (128, 0, 132)])
def test_bytes_of_a_row(device, rank, rope, size):
    assert row_bytes(rank, rope) == size
    assert pack(*values(device, rank, rope)).shape == (2, 3, size)


@pytest.mark.parametrize(("rank", "rope"), [(9, 4), (510, 64), (32, 3)])
def test_sizes_whose_scales_would_not_be_aligned_are_refused(device, rank, rope):
    with pytest.raises(CacheError, match=f"multiple of 4 and an even qk_rope_head_dim, came {rank} and {rope}"):
        pack(*values(device, rank, rope))


def test_the_layout_field_by_field(device):
    c_kv, k_pe = torch.zeros(1, 512, device=device), torch.arange(64.0, device=device).view(1, 64) / 8
    c_kv[0, :128] = 1.0
    c_kv[0, 128] = -448.0
    c_kv[0, 256:258] = torch.tensor([449.0, 20.0])
    (row,) = pack(c_kv, k_pe)
    assert row.dtype == torch.uint8
    assert row[:128].tolist() == [0x78] * 128, "1 / 2**-8 is 256, e4m3 0 1111 000"
    assert row[128:130].tolist() == [0xFE, 0x00], "-448"
    assert row[256:259].tolist() == [0x76, 0x52, 0x00], "449 / 2 rounds to 224, 20 / 2 is 10"
    assert row[384:512].tolist() == [0] * 128
    assert row[512:528].clone().view(torch.float32).tolist() == [2**-8, 1.0, 2.0, 2**-22]
    assert torch.equal(row[528:].clone().view(torch.bfloat16), k_pe[0].bfloat16())


@given(seed=seeds, rank=st.sampled_from([4, 32, 128, 132, 512]), spread=st.sampled_from([0.0, 1.0, 6.0]))
def test_every_value_comes_back_within_a_sixteenth_of_itself_or_of_the_smallest_step(device, seed, rank, spread):
    c_kv, k_pe = values(device, rank, 4, seed=seed, spread=spread)
    back = unpack(pack(c_kv, k_pe), rank, 4, torch.float32)
    assert torch.equal(back[..., rank:], k_pe.bfloat16().float())
    for one, two in zip(by_tile(c_kv), by_tile(back[..., :rank])):
        peak = one.abs().amax(-1, keepdim=True)
        scale = 2 ** (peak.clamp_min(SMALLEST_PEAK).double() / LARGEST).log2().ceil()
        assert ((one - two).abs() <= (one.abs() / 16).maximum(scale * 2**-10)).all()
        assert ((one - two).abs() <= peak.clamp_min(SMALLEST_PEAK) / 16).all()


@given(seed=seeds, rank=st.sampled_from([4, 132, 512]), spread=st.sampled_from([0.0, 6.0]))
def test_what_was_read_is_read_again(device, seed, rank, spread):
    """Values always; bytes too, but where the largest value rounds to 224 and so needs half the scale."""
    rows = pack(*values(device, rank, 4, seed=seed, spread=spread))
    back = unpack(rows, rank, 4, torch.float32)
    again = pack(*back.split([rank, 4], -1))
    assert torch.equal(unpack(again, rank, 4, torch.float32), back)
    peaks = [codes.view(torch.float8_e4m3fn).float().abs().amax(-1) for codes in by_tile(rows[..., :rank])]
    settled = torch.stack([peak != LARGEST / 2 for peak in peaks]).all(0)
    assert torch.equal(again[settled], rows[settled])
    once_more = pack(*unpack(again, rank, 4, torch.float32).split([rank, 4], -1))
    assert torch.equal(once_more, again)


@pytest.mark.parametrize("power", [-21, -3, 0, 7, 100])
def test_a_peak_of_448_times_a_power_of_two_needs_no_larger_scale(device, power):
    edge = torch.tensor(LARGEST * 2.0**power, device=device)
    for peak, want in ((edge, power), (torch.nextafter(edge, edge * 2), power + 1)):
        rows = pack(peak.expand(1, 4), torch.zeros(1, 0, device=device))
        assert rows[0, 4:].clone().view(torch.float32).item() == 2.0**want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_reading_is_exact_in_every_dtype(device, dtype):
    rows = pack(*values(device, 132, 4, spread=3.0))
    exact = unpack(rows, 132, 4, torch.float64)
    assert torch.equal(unpack(rows, 132, 4, dtype).double(), exact)
    codes, scale = rows[..., :132].view(torch.float8_e4m3fn).double(), rows[..., 132:140].clone().view(torch.float32)
    for tile, (one, two) in enumerate(zip(by_tile(codes), by_tile(exact[..., :132]))):
        assert torch.equal(one * scale[..., tile : tile + 1].double(), two)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 130])
def test_a_bad_value_spoils_its_tile_and_no_other(device, bad, place):
    c_kv, k_pe = values(device, 132, 4)
    clean = unpack(pack(c_kv, k_pe), 132, 4, torch.float32)
    c_kv[1, 2, place], k_pe[0, 0, 1] = bad, bad
    found = unpack(pack(c_kv, k_pe), 132, 4, torch.float32)
    spoilt = torch.zeros_like(found, dtype=torch.bool)
    spoilt[1, 2, :TILE] = place < TILE
    spoilt[1, 2, TILE:132] = place >= TILE
    assert found[spoilt].isnan().all()
    assert torch.equal(found[0, 0, 133:134], k_pe[0, 0, 1:2]) or math.isnan(bad)
    spoilt[0, 0, 133] = True
    assert torch.equal(found[~spoilt], clean[~spoilt])


def test_rows_of_zero_bytes_are_zeros(device):
    assert not unpack(torch.zeros(2, 656, dtype=torch.uint8, device=device), 512, 64, torch.float32).any()


def test_same_bytes_on_cpu_and_on_every_run(device):
    c_kv, k_pe = values(device, 512, 64, rows=50, spread=4.0)
    rows = pack(c_kv, k_pe)
    assert all(torch.equal(pack(c_kv, k_pe), rows) for _ in range(5))
    assert torch.equal(pack(c_kv.cpu(), k_pe.cpu()), rows.cpu())


def test_cache_read_is_unpack(device):
    pool = torch.zeros(2, 7, row_bytes(132, 4), dtype=torch.uint8, device=device)
    pool[:, :3] = pack(*values(device, 132, 4))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(torch.ops.dsa.cache_read(pool, 132, 4, dtype), unpack(pool, 132, 4, dtype))
        torch.library.opcheck(torch.ops.dsa.cache_read.default, (pool, 132, 4, dtype))


def test_cache_read_takes_fp8_rows_alone(device):
    for pool in (torch.zeros(2, 7, 136, device=device), torch.zeros(2, 7, 136, dtype=torch.uint8, device=device)):
        with pytest.raises(InputError, match=r"expected a pool of fp8 rows, uint8\[..., 148\] for R = 132 and P = 4"):
            torch.ops.dsa.cache_read(pool, 132, 4, torch.float32)
