"""What fp8 makes of a vector, against the same rule in Python's floats."""

import math

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from dsa_compile.lowering.fp8_keys import decode, quantise
from dsa_compile.lowering.fp8_rows import pack


def vectors(device, width=16, rows=5, seed=0, spread=0.0):
    """float32[rows, width], vectors and single values ``10 ** spread`` apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x *= 10 ** (spread * torch.randn(rows, 1, generator=generator))
    return (x * 10 ** (spread * torch.rand(rows, width, generator=generator) - spread)).to(device)


@given(seed=seeds, width=st.sampled_from([1, 16, 48, 128]), spread=st.sampled_from([0.0, 1.0, 4.0]))
def test_codes_and_scales_are_the_nearest(device, seed, width, spread):
    x = vectors(device, width, seed=seed, spread=spread)
    codes, scales = quantise(x)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.uint8, x.shape, torch.float32, (len(x),))
    want = [naive.fp8(row) for row in x.double()]
    assert decode(codes, torch.float64).tolist() == [values for values, _ in want]
    assert scales.tolist() == [scale for _, scale in want]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_rounds_as_float32(device, dtype):
    x = vectors(device, rows=200).to(dtype)
    for ours, theirs in zip(quantise(x), quantise(x.float())):
        assert torch.equal(ours, theirs)


def test_every_code_comes_back(device):
    codes = torch.arange(256, device=device).byte()
    codes = codes[decode(codes, torch.float32).isfinite()].view(-1, 1)
    peaks = torch.full_like(codes, 0x7E)  # 448
    found, scales = quantise(decode(torch.cat([codes, peaks], 1), torch.float32))
    assert scales.tolist() == [1.0] * 254
    assert torch.equal(found[:, :1], codes)


@pytest.mark.parametrize("power", [-21, -3, 0, 7, 100, 119])
def test_a_peak_of_448_times_a_power_of_two_needs_no_larger_scale(device, power):
    edge = torch.tensor([448 * 2.0**power], device=device)
    assert quantise(edge)[1].item() == 2.0**power
    assert quantise(torch.nextafter(edge, 2 * edge))[1].item() == 2.0 ** (power + 1)


@pytest.mark.parametrize("tiny", [0.0, 1e-4, 1e-9, 2.0**-149])
def test_vectors_below_the_smallest_peak_share_its_scale(device, tiny):
    x = torch.full((1, 16), tiny, device=device)
    codes, scales = quantise(x)
    assert scales.item() == 2.0**-22
    assert decode(codes, torch.float64).tolist() == [[naive.e4m3(v * 2.0**22) for v in x.double()[0].tolist()]]


def test_small_values_beside_a_large_one_are_denormal_codes(device):
    x = torch.tensor([[448.0, 2**-6, 7 * 2**-9, 2**-9, 2**-10, 1.5 * 2**-9, -(2**-11)]], device=device)
    assert quantise(x)[0].tolist() == [[0x7E, 0x08, 0x07, 0x01, 0x00, 0x02, 0x80]], "halves go to the even code"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_makes_its_vector_nan_and_no_other(device, bad):
    x = vectors(device)
    clean = quantise(x)
    x[2, 3] = bad
    codes, scales = quantise(x)
    assert not codes[2].any()
    assert scales[2].isnan()
    others = torch.arange(5, device=device) != 2
    assert torch.equal(codes[others], clean[0][others])
    assert torch.equal(scales[others], clean[1][others])


def test_a_tile_of_a_latent_row_is_such_a_vector(device):
    x = vectors(device, 132, spread=2.0)
    rows = pack(x, x[:, :0])
    for tile, (start, end) in enumerate([(0, 128), (128, 132)]):
        codes, scales = quantise(x[:, start:end])
        assert torch.equal(rows[:, start:end], codes)
        assert torch.equal(rows[:, 132 + 4 * tile :][:, :4].contiguous().view(torch.float32)[:, 0], scales)
