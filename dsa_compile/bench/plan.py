"""``dsa-compile bench plan``: the decode step of a large model's slice under one selection plan after another."""

import json
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dsa_compile.api import optimize
from dsa_compile.bench import timing
from dsa_compile.bench.apart import side_by_side, turn
from dsa_compile.bench.plan_slice import SLICES, TUNED, Setting, check_slices, fill, held
from dsa_compile.config import CacheConfig
from dsa_compile.errors import ConfigError
from dsa_compile.lowering.select_overlap.streams import in_turn
from dsa_compile.plan import check_name

CONTEXTS = (10 << 10, 32 << 10, 64 << 10, 128 << 10, 195 << 10)
PLANS = ("own", "share:1/2", "share:1/4", "share:1/8", "mli", "mli+share:1/2", "mli+share:1/4", "mli+share:1/8")
ONCE = "one indexer"
"""All layers attend to the selection of layer 0: what lies between it and ``own`` is the time of indexers."""
IN_TURN = "mli, in turn"
"""MLI with all its work on one stream: what the overlapped must equal to the bit."""


@dataclass
class Row:
    """Decode steps under one plan. ``us``: of a step, by context; ``refused``: why there is none."""

    plan: str
    indexers: int = 0
    us: dict[int, float] = field(default_factory=dict)
    compile_s: float = 0.0
    refused: str = ""


def plan(
    slices: Sequence[str] = ("deepseek_v32",),
    batches: Sequence[int] = (1, 8, 32),
    contexts: Sequence[int] = CONTEXTS,
    plans: Sequence[str] = PLANS,
    layers: int = 32,
    experts: bool = False,
    mode: str = TUNED,
    at_once: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """Time decode steps in CUDA graphs on the current GPU, and print a table for each slice and batch.

    Beside ``plans`` run ``own``, `ONCE`, ``mli`` and `IN_TURN`, from which follow the time of an indexer, the step
    without any, and how much MLI hides.

    Args:
        slices: of `SLICES`. contexts: tokens of each sequence, that of the step included.
        mode: of ``torch.compile``, for all plans.
        at_once: plans that compile side by side, once the first has filled Inductor's caches; each holds a model and a
            cache. They are timed one after another.
        out: a JSON file for the figures, written after each plan.

    Returns:
        The figures; ``"wrong"`` names the settings in which overlapped and serial scoring gave different logits.

    Raises:
        ConfigError: a slice or plan is unknown, a number is too small, or there is no GPU.
    """
    check_slices(slices, list(SLICES))
    for wanted in plans:
        check_name(wanted)
    if layers < 3 or min(batches) < 1 or min(contexts) < 2 or at_once < 1:
        raise ConfigError(
            f"bench plan: expected at least 3 layers, 1 sequence, 2 tokens and 1 plan at once, came {layers}, "
            f"{min(batches)}, {min(contexts)} and {at_once}."
        )
    gpu, progress = timing.Gpu(), Console(stderr=True)
    figures: dict[str, Any] = {"device": gpu.name, "torch": torch.__version__, "settings": [], "wrong": []}
    for name, batch in ((name, batch) for name in slices for batch in batches):
        setting, rows = Setting(name, layers, batch, experts, tuple(sorted(contexts)), mode), list[Row]()
        logits: dict[str, Tensor] = {}
        figures["settings"].append(entry := {**asdict(setting), "rows": []})
        first, *others = dict.fromkeys(("own", ONCE, "mli", IN_TURN, *plans))
        for group in [first], *(others[i : i + at_once] for i in range(0, len(others), at_once)):
            progress.print(f"{setting.title}: {', '.join(group)}", style="dim")
            for row, output in side_by_side(measured, [(setting, wanted) for wanted in group]):
                rows.append(row)
                entry["rows"].append(asdict(row))
                logits[row.plan] = output
            entry["hidden"] = {
                context: asdict(found) for context in contexts if (found := hiding(rows, setting, context))
            }
            if out is not None:
                out.write_text(json.dumps(figures, indent=1) + "\n")
        if not torch.equal(logits["mli"], logits[IN_TURN]):
            figures["wrong"].append(setting.title)
        Console(width=None if sys.stdout.isatty() else 160).print(table(setting, rows, gpu.name))
    return figures


def measured(setting: Setting, wanted: str) -> tuple[Row, Tensor]:
    """Steps under a plan, each in one CUDA graph, over a cache that holds the longest context; their logits."""
    options: dict[str, Any] = {"plan": wanted}
    if wanted == ONCE:
        options["plan"] = "share:F" + "S" * (setting.layers - 1)
    if wanted == IN_TURN:
        options["plan"] = "mli"
    row, longest, gpu = Row(wanted), max(setting.contexts), timing.Gpu()
    torch.manual_seed(0)
    try:
        model = SLICES[setting.slice].model(setting.layers, setting.experts, gpu.device)
        with warnings.catch_warnings(action="ignore"):  # of reuse: random weights have no quality to lose
            optimize(model, **options, mode=setting.mode, cache=CacheConfig(index_dtype="fp8"))
        row.indexers = len(model.dsa.plan.owners)
        cache = model.make_cache(setting.batch, longest)
        fill(cache)
        lengths, ids = held(cache, longest - 1), torch.full((setting.batch, 1), 3, device=gpu.device)

        def step(ids: Tensor) -> tuple[Tensor]:
            cache.lengths.valid, cache.lengths.seen, cache.lengths.bound = lengths
            return (model(ids, past_key_values=cache).logits,)

        start = time.perf_counter()
        with torch.no_grad(), in_turn() if wanted == IN_TURN else nullcontext():
            recording = gpu.record(step, [(ids,)])
        row.compile_s = time.perf_counter() - start
        logits = []
        with turn():
            for context in setting.contexts:
                lengths[0].fill_(context - 1)
                row.us[context] = gpu.time(recording).median
                logits.append(recording.outputs[0][0].cpu())
        return row, torch.stack(logits)
    except torch.OutOfMemoryError:
        row.refused = "out of memory"
        return row, torch.empty(0)


@dataclass(frozen=True)
class Hiding:
    """Microseconds of a step: of one indexer, and of the step without any. ``share``: of indexers that MLI hides."""

    indexer: float
    ceiling: float
    share: float


def hiding(rows: Sequence[Row], setting: Setting, context: int) -> Hiding | None:
    """What follows from the rows, once they are there.

    MLI runs the first indexer alone and drops the last; those between run beside their layers.
    """
    us = {row.plan: row.us[context] for row in rows if context in row.us}
    if not us.keys() >= {"own", ONCE, "mli"}:
        return None
    one = (us["own"] - us[ONCE]) / (setting.layers - 1)
    if one <= 0:  # indexers are lost in the noise
        return None
    return Hiding(one, us[ONCE] - one, (us["own"] - one - us["mli"]) / ((setting.layers - 2) * one))


def table(setting: Setting, rows: Sequence[Row], device: str) -> Table:
    """Milliseconds of a step, and how many times as fast it is as under ``own``."""
    made = Table(title=f"decode step, {setting.title}, {device}", caption="ms, and times as fast as own")
    made.add_column("plan")
    made.add_column("indexers", justify="right")
    for context in setting.contexts:
        made.add_column(f"{context / 1024:g}K", justify="right")
    own = next((row.us for row in rows if row.plan == "own"), {})
    for row in rows:
        cells = [
            f"{row.us[c] / 1e3:.3f} {own[c] / row.us[c]:.2f}x" if c in row.us else row.refused for c in setting.contexts
        ]
        made.add_row(row.plan, str(row.indexers), *cells)
    found = [h for context in setting.contexts if (h := hiding(rows, setting, context)) is not None]
    if len(found) == len(setting.contexts):
        made.add_row(
            "ceiling: none",
            "0",
            *[f"{h.ceiling / 1e3:.3f} {own[c] / h.ceiling:.2f}x" for h, c in zip(found, setting.contexts)],
        )
        made.add_row("us of an indexer", "", *[f"{h.indexer:.1f}" for h in found])
        made.add_row("hidden by mli", "", *[f"{h.share:.0%}" for h in found])
    return made
