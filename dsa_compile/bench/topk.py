"""``dsa-compile bench topk``: exact top-k of rows of scores, by itself."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsa_compile.bench import table
from dsa_compile.bench.cases import Case, Target, spread
from dsa_compile.bench.harness import Bench, Peer, run
from dsa_compile.bench.selections import well_formed
from dsa_compile.bench.timing import Gpu, Recording
from dsa_compile.lowering.rows import topk_slots
from dsa_compile.lowering.select.topk import topk as kernel

MOST_SETS = 32
"""Of a few rows: what the score kernel has just written is read from the L2 in use too."""
SAMPLE = 1024
"""Rows that are compared with the exact selection: all of them, where a case has few."""
COMPARED_AT_ONCE = 64
NARROW = 1e-3
"""Spread of scores around 100: they differ in their last ten bits alone, and often not at all."""

Inputs = tuple[Tensor, Tensor]
"""Scores float32[N, S] and visible int32[N, 2]."""


@dataclass(frozen=True)
class TopkCase(Case):
    """The best ``topk`` of each of ``queries`` rows of ``keys`` scores. ``narrow``: these lie close together."""

    queries: int
    keys: int
    narrow: bool = False
    topk: int = 2048

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        """Scores read once, indices written."""
        return 4 * self.queries * (self.keys + self.topk)

    @property
    def sets(self) -> int:
        return min(MOST_SETS, super().sets)

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        """Normal values; every row sees all of them."""
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.randn(self.queries, self.keys, generator=generator, device=device)
        if self.narrow:
            scores.mul_(NARROW).add_(100)
        return scores, torch.tensor([0, self.keys], dtype=torch.int32, device=device).repeat(self.queries, 1)


def _case(queries: int, keys: int, us: float | None = None, *, narrow: bool = False) -> TopkCase:
    targets = *([] if us is None else [Target(us, "us")]), Target(2, "x torch.topk")
    return TopkCase(f"{queries}x{keys}{'-narrow' if narrow else ''}", queries, keys, narrow, targets=targets)


CASES = (
    _case(1, 131072, 16),
    _case(1, 1048576),
    _case(64, 131072, 45),
    _case(4096, 8192),
    _case(4096, 32768, 380),
    _case(4096, 131072, 1200),
    _case(4096, 131072, 1800, narrow=True),
)


@dataclass(frozen=True)
class Verdict:
    """``wrong``: of the ``compared`` rows. ``ordered``: every row names K distinct slots, ascending."""

    wrong: int
    compared: int
    ordered: bool

    @property
    def right(self) -> bool:
        return self.ordered and self.wrong == 0


def checked(
    case: TopkCase, sets: Sequence[Inputs], outputs: Sequence[tuple[Tensor, ...]], *, any_tie: bool = False
) -> Verdict:
    """Compare rows that are spread over all launches with the exact selection: ties go to the lower slot.

    ``any_tie``: ties may go to any slot, and indices, the last of a launch's outputs, stand in any order.
    """
    picks = [written[-1].sort(-1).values if any_tie else written[-1] for written in outputs]
    places = spread(len(sets), case.queries, SAMPLE)
    if not all(well_formed(chosen, visible) for chosen, (_, visible) in zip(picks, sets)):
        return Verdict(len(places), len(places), ordered=False)
    wrong = 0
    for part in _parts(places):
        scores = torch.stack([sets[s][0][row] for s, row in part])
        chosen = torch.stack([picks[s][row] for s, row in part]).long()
        best = topk_slots(scores.double()[None], torch.ones_like(scores[None], dtype=torch.bool), case.topk)[0].long()
        if any_tie:
            chosen, best = (scores.gather(-1, slots).sort(-1).values for slots in (chosen, best))
        wrong += int((chosen != best).any(-1).sum())
    return Verdict(wrong, len(places), ordered=True)


def _parts(places: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    for start in range(0, len(places), COMPARED_AT_ONCE):
        yield places[start : start + COMPARED_AT_ONCE]


def _record(case: TopkCase, sets: Sequence[Inputs], gpu: Gpu) -> tuple[Recording, dict[str, Any]]:
    def launch(scores: Tensor, visible: Tensor) -> tuple[Tensor]:
        out = torch.empty(case.queries, case.topk, dtype=torch.int32, device=scores.device)
        kernel(scores, visible, case.topk, out)
        return (out,)

    return gpu.record(launch, sets), {}


def _peers(case: TopkCase) -> Iterator[Peer[TopkCase]]:
    """What PyTorch has, and FlashInfer where it is installed."""

    def flashinfer(scores: Tensor) -> tuple[Tensor, ...]:
        from flashinfer import top_k

        return tuple(top_k(scores, case.topk))

    check = partial(checked, any_tie=True)
    yield Peer("torch.topk", lambda scores: torch.topk(scores, case.topk, sorted=False), check, _scores)
    if importlib.util.find_spec("flashinfer") is not None:
        yield Peer("flashinfer", flashinfer, check, _scores)


def _scores(inputs: Inputs) -> tuple[Tensor]:
    return (inputs[0],)


COLUMNS = (
    table.CASE,
    table.TIME,
    table.SPREAD,
    table.GBYTES,
    table.SHARE,
    table.figure("wrong rows", "wrong"),
    table.figure("of", "compared"),
    table.figure("speed-up", "speedup", ".2f"),
    table.TARGET,
)


def topk(names: Sequence[str] | None = None, out: Path | None = None) -> dict[str, Any]:
    """Check, then time `dsa_compile.lowering.select.topk.topk`; see `harness.run`.

    Raises:
        ConfigError: a case is unknown, or there is no GPU.
    """
    bench = Bench(
        title="top-k of index scores",
        cases=CASES,
        record=_record,
        check=checked,
        columns=COLUMNS,
        peers=_peers,
        note="the scores of 1x131072 lie in the L2, as the score kernel leaves them",
    )
    return run(bench, names, out)
