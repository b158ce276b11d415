"""Sizes of Triton tiles, whose sides are powers of two."""


def power_of_two(n: int) -> int:
    """The smallest that is not below ``n``; 1 for 0."""
    return 1 << max(0, n - 1).bit_length()
