"""Rows of scores that selections get wrong, and what is right."""

import math

import numpy
import torch

INF, NAN = math.inf, math.nan


def sown(base, step, values):
    """``base`` with ``values`` at every ``step``-th slot, from 5 on."""
    row = base.clone()
    row[5::step] = values[5::step]
    return row


def shuffled(S, generator):
    return torch.randperm(S, generator=generator).int()


ROWS = {
    "normal": lambda S, g: torch.randn(S, generator=g),
    "all equal": lambda S, g: torch.full((S,), 0.25),
    "all NaN": lambda S, g: torch.full((S,), NAN),
    "all -inf": lambda S, g: torch.full((S,), -INF),
    "all +inf": lambda S, g: torch.full((S,), INF),
    "few numbers in -inf": lambda S, g: sown(torch.full((S,), -INF), 997, torch.randn(S, generator=g)),
    "few numbers in NaN": lambda S, g: sown(torch.full((S,), NAN), 997, torch.randn(S, generator=g)),
    "few numbers and NaN in -inf": lambda S, g: sown(
        sown(torch.full((S,), -INF), 499, torch.randn(S, generator=g)), 997, torch.full((S,), NAN)
    ),
    "all zero but a hundred": lambda S, g: sown(torch.zeros(S), -(-S // 100), torch.rand(S, generator=g)),
    "zeros of both signs": lambda S, g: torch.where(shuffled(S, g) % 2 == 0, 0.0, -0.0),
    "half zero": lambda S, g: torch.randn(S, generator=g).relu(),
    "many ties": lambda S, g: torch.randint(0, 4, (S,), generator=g).float(),
    "up": lambda S, g: torch.arange(S).float(),
    "down": lambda S, g: -torch.arange(S).float(),
    "periods": lambda S, g: (torch.arange(S) % 64).float(),
    "runs": lambda S, g: torch.randn(S // 16 + 1, generator=g).repeat_interleave(16)[:S],
    "the best side by side": lambda S, g: torch.randn(S, generator=g) + 9 * (torch.arange(S) // (S // 8 + 1) == 5),
    "low mantissa bits": lambda S, g: (shuffled(S, g) % 1024 + (127 << 23)).view(torch.float32),
    "denormal": lambda S, g: torch.where(shuffled(S, g) % 2 == 0, 1, -1) * shuffled(S, g).view(torch.float32),
    "large and narrow": lambda S, g: 1000 + 1e-3 * torch.randn(S, generator=g),
    "+inf and NaN often": lambda S, g: sown(
        sown(torch.randn(S, generator=g), 5, torch.full((S,), INF)), 3, torch.full((S,), NAN)
    ),
    "any bits": lambda S, g: torch.randint(-(2**31), 2**31, (S,), generator=g).int().view(torch.float32),
}
"""Rows of S scores."""


def hostile(S, seed=0):
    """float32[rows, S], one of each kind."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([row(S, generator) for row in ROWS.values()])


def expected(scores, visible, index_topk):
    """By a stable sort of the visible slots in float64."""
    out = torch.full((scores.shape[0], index_topk), -1, dtype=torch.int32)
    for picks, row, span in zip(out, scores.cpu().double().numpy(), visible.tolist()):
        start, end = (min(max(0, edge), len(row)) for edge in span)
        slots = numpy.arange(start, max(start, end))
        if len(slots) > index_topk:
            slots = slots[row[slots] != -INF]
            nan = numpy.isnan(row[slots])
            slots = slots[numpy.lexsort((slots, numpy.where(nan, 0, -row[slots]), nan))[:index_topk]]
        picks[: len(slots)] = torch.from_numpy(numpy.sort(slots))
    return out
