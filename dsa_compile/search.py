"""`search_plan`: which layers may share a selection, found by the loss that it costs (IndexCache, arXiv 2603.12201)."""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from dsa_compile.config import DSAConfig
from dsa_compile.errors import ConfigError, InputError
from dsa_compile.plan import Plan
from dsa_compile.record import read_record, write_record
from dsa_compile.replanning import Replanned
from dsa_compile.texts import loss_past_k, token_rows

Runs = tuple[bool, ...]
"""For each layer whether it runs its indexer."""

STATE = "plan losses"
ROUNDING = 1e-9
"""Of ``retention * layers``: 7 of 100 layers are 0.07, and a bit more than 7 in floating point."""


@dataclass(frozen=True)
class Point:
    """A plan on the way: ``retention`` is the share of the layers that run their indexer."""

    retention: float
    plan: str
    loss: float


@dataclass(frozen=True, kw_only=True)
class PlanSearch:
    """What `search_plan` found. ``str()`` of it, or rich's ``print``, shows a table.

    Attributes:
        subject: what the losses are of: weights and their dtype, selector, K, texts.
        dense, own: losses with attention to everything, and with every layer's own selection.
        curve: from all indexers down to ``retention``; its last plan is `plan`.
    """

    subject: dict[str, Any]
    dense: float
    own: float
    curve: tuple[Point, ...]

    @property
    def plan(self) -> str:
        """For ``optimize(model, plan=...)``."""
        return self.curve[-1].plan

    def save(self, path: Path) -> None:
        """Write the figures as JSON."""
        curve = [asdict(point) for point in self.curve]
        figures = {"plan": self.plan, "dense": self.dense, "own": self.own, "curve": curve}
        write_record(path, "plan search", self.subject, figures)

    def __rich__(self) -> Table:
        table = Table(title=f"loss past K = {self.subject['index_topk']}: dense {self.dense:.4f}, own {self.own:.4f}")
        for name in ("layers that run their indexer", "plan", "loss"):
            table.add_column(name, justify="left" if name == "plan" else "right")
        for point in self.curve:
            table.add_row(f"{point.retention:.0%}", point.plan, f"{point.loss:.4f}")
        return table


def search_plan(
    model: nn.Module,
    texts: Sequence[str | Tensor],
    config: DSAConfig | None = None,
    *,
    retention: float = 1 / 4,
    mli: bool = True,
    blocks: int = 1,
    tokens: int | None = None,
    tokenizer: Any = None,
    state: Path | None = None,
    progress: bool = False,
    **fields: Any,
) -> PlanSearch:
    """Find layers that can attend to the selection of a layer before them, without training.

    Greedy: every layer runs its indexer at first; of those that still do, the one whose sharing costs least loss on
    ``texts`` shares from then on, until ``retention`` is reached. Layer 0, and layers that share in the model itself,
    stay as they are. The loss is that of the next token, on the rows that see more than K tokens.

    n layers take about n² (1 - retention²) / 2 passes over the texts. ``blocks`` splits a deep model into as many runs
    of neighbours: a step then lets one layer of each share, and as many times fewer steps are needed. The first layer
    of each block keeps its indexer, so that layers of different blocks do not share with each other.

    Args:
        model: a stock model of a supported family; stays as it is. texts: see `token_rows`.
        config: options as for `optimize`, without a plan; ``fields`` replace single ones. Graphs run uncompiled and
            without a cache.
        retention: share of the layers that still run their indexer, in (0, 1].
        mli: search among plans with the Multi-layer Indexer (``"mli+share:..."``), whose layers attend one layer later.
        tokens: of a row; see `token_rows`. tokenizer: for texts that are strings.
        state: a file that takes every loss as soon as it is known, and gives those of a search that was interrupted.
        progress: show a bar on stderr.

    Raises:
        ConfigError: an option is out of range, or ``state`` is of another search.
        InputError: the texts are none, too short, or have a loss that is not finite.
        UnsupportedModelError, IndexerWeightsError, CheckpointError: as of `optimize`.
    """
    options = DSAConfig.of(config, **fields)
    if options.plan is not None or options.layer0 != "serial":
        raise ConfigError(
            f"plan={options.plan!r}, layer0={options.layer0!r}: search_plan finds the plan; leave them out."
        )
    if not 0 < retention <= 1:
        raise ConfigError(f"retention: expected a share of the layers in (0, 1], came {retention!r}.")
    replanned = Replanned(model, options)
    owners, layers = sorted(replanned.own.owners), len(replanned.own.sources)
    keep = min(max(math.ceil(retention * layers - ROUNDING), 1), len(owners))
    if not 1 <= blocks <= keep:
        raise ConfigError(
            f"blocks: expected 1 to {keep}, since the first layer of each keeps its indexer and retention={retention} "
            f"leaves {keep} of {layers}; came {blocks}."
        )
    bounds = [len(owners) * block // blocks for block in range(blocks + 1)]
    candidates = [owners[start + 1 : end] for start, end in itertools.pairwise(bounds)]
    start: Runs = tuple(layer in owners for layer in range(layers))
    losses = _Losses(replanned, token_rows(texts, tokenizer, tokens, replanned.model.dsa.index_topk), state)
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("measuring plans", total=_evaluations(start, candidates, keep) + 2)

        @functools.cache
        def loss(wanted: str | tuple[str, ...]) -> float:
            value = losses(replanned.plan(wanted))
            bar.advance(task)
            return value

        dense, own = loss(("dense",) * layers), loss("own")
        steps = greedy(start, candidates, keep, lambda runs: loss(share_text(runs, mli)))
        curve = tuple(Point(sum(runs) / layers, share_text(runs, mli), value) for runs, value in steps)
    return PlanSearch(subject=losses.subject, dense=dense, own=own, curve=curve)


def greedy(
    runs: Runs, blocks: Sequence[Sequence[int]], keep: int, loss: Callable[[Runs], float]
) -> Iterator[tuple[Runs, float]]:
    """From ``runs`` down to ``keep`` layers that run their indexer, each step with its loss.

    A step lets the layer of least loss share, of equal ones the first, in each of ``blocks`` at once.
    """
    yield runs, loss(runs)
    while (left := sum(runs) - keep) > 0:
        tried = [[(loss(_sharing(runs, layer)), layer) for layer in block if runs[layer]] for block in blocks]
        for _, layer in sorted(min(block) for block in tried if block)[:left]:
            runs = _sharing(runs, layer)
        yield runs, loss(runs)


def _evaluations(runs: Runs, blocks: Sequence[Sequence[int]], keep: int) -> int:
    """How many plans `greedy` asks the loss of: the losses decide which, not how many."""
    asked: set[Runs] = set()

    def ask(runs: Runs) -> float:
        asked.add(runs)
        return 0.0

    list(greedy(runs, blocks, keep, ask))
    return len(asked)


def share_text(runs: Runs, mli: bool) -> str:
    """The plan, for `plan_of`, under which the layers of ``runs`` run their indexer."""
    return ("mli+" if mli else "") + "share:" + "".join("F" if run else "S" for run in runs)


def _sharing(runs: Runs, layer: int) -> Runs:
    return (*runs[:layer], False, *runs[layer + 1 :])


class _Losses:
    """Mean loss past K of a plan, measured once; ``state`` keeps it beyond the process."""

    def __init__(self, replanned: Replanned, rows: list[Tensor], state: Path | None) -> None:
        texts = hashlib.sha256(repr([row.tolist() for row in rows]).encode()).hexdigest()
        self.subject = replanned.model.dsa.subject() | {"dtype": str(replanned.model.dtype), "texts": texts}
        self.replanned, self.rows, self.state = replanned, rows, state
        if state is not None and not state.parent.is_dir():
            raise ConfigError(f"state: expected a file in a folder that exists, came {state}.")
        found = {} if state is None or not state.exists() else read_record(state, STATE, self.subject)
        self.known: dict[str, float] = found.get("losses", {})

    def __call__(self, plan: Plan) -> float:
        key = " ".join(plan.text())
        if key not in self.known:
            self.known[key] = self._measure(plan)
            if self.state is not None:
                write_record(self.state, STATE, self.subject, {"losses": self.known})
        return self.known[key]

    def _measure(self, plan: Plan) -> float:
        index_topk = self.replanned.model.dsa.index_topk
        parts = [loss_past_k(self.replanned.logits(ids, plan), ids, index_topk) for ids in self.rows]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        if not math.isfinite(loss):
            raise InputError(f"texts: their loss under the plan {plan.letters} is {loss}; is the model in float16?")
        return loss
