"""`fp8_keys.quantise` in Triton. Import this module in kernels only: it needs triton."""

import triton
import triton.language as tl

from dsa_compile.lowering import fp8_keys

SMALLEST_PEAK = tl.constexpr(fp8_keys.SMALLEST_PEAK)


@triton.jit
def quantise(values):
    """e4m3 codes of the rows of a float32 tile, and the scale of each, to the bit."""
    # NaN and inf have the largest bits, so an integer maximum keeps what a float maximum may drop
    bits = tl.max(tl.abs(values).to(tl.int32, bitcast=True), 1)
    good = bits < 0x7F800000
    peak = tl.maximum(bits.to(tl.float32, bitcast=True), SMALLEST_PEAK)
    exponent = (peak.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
    exponent -= 8 << 23
    scale = tl.where(good, exponent.to(tl.float32, bitcast=True), float("nan"))
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    return tl.where(good[:, None], values * inverse[:, None], 0.0).to(tl.float8e4nv), scale
