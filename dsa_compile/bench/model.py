"""``dsa-compile bench model``: decoding and prompts of a whole model, beside stock transformers."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dsa_compile.bench import timing
from dsa_compile.bench.apart import apart
from dsa_compile.bench.model_sizes import DENSE_WIDTHS, TITLE, attention_layer, whole_model
from dsa_compile.bench.model_ways import WAYS, Ours, TheirsCompiled
from dsa_compile.bench.plan_slice import check_slices
from dsa_compile.config import nearest
from dsa_compile.errors import ConfigError

CONTEXTS = (8 << 10, 32 << 10, 128 << 10)
PROMPTS = tuple(1024 << n for n in range(2, 8))
DECODE, PREFILL, LAYER = "decode", "prefill", "attention layer"


@dataclass(frozen=True)
class Job:
    """What one process measures: steps over ``tokens`` cached ones, or prompts of as many, shortest first."""

    model: str
    way: str
    what: str
    batch: int
    tokens: tuple[int, ...]


def model(
    models: Sequence[str] = ("deepseek_v32",),
    batches: Sequence[int] = (1, 8, 32),
    contexts: Sequence[int] = CONTEXTS,
    prompts: Sequence[int] = PROMPTS,
    ways: Sequence[str] = tuple(WAYS),
    out: Path | None = None,
) -> dict[str, Any]:
    """Time decode steps, prompts and one attention layer's prompts on the current GPU, and print a table of each.

    Args:
        models: of `DENSE_WIDTHS`. batches, contexts: of decoding. prompts: tokens of a prompt, of one sequence.
        out: a JSON file for the figures, written after each job; `dsa_compile.bench.page` makes a page of it.

    Returns:
        The figures; ``"wrong"`` is empty: nothing here is checked that is not checked elsewhere.

    Raises:
        ConfigError: a model or way is unknown, or there is no GPU.
    """
    check_slices(models, list(DENSE_WIDTHS))
    if unknown := [way for way in ways if way not in WAYS]:
        raise ConfigError(f"bench model: unknown way {unknown[0]!r}; {nearest(unknown[0], list(WAYS), 'ways')}")
    gpu, progress = timing.Gpu(), Console(stderr=True)
    figures: dict[str, Any] = {"device": gpu.name, "torch": torch.__version__, "title": TITLE, "rows": [], "wrong": []}
    for job in jobs(models, ways, batches, tuple(sorted(contexts)), tuple(sorted(prompts))):
        progress.print(f"{job.model}: {job.what}, batch {job.batch}, {job.way}", style="dim")
        figures["rows"] += apart(measured, job)
        if out is not None:
            out.write_text(json.dumps(figures, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in models:
        for what in (DECODE, PREFILL, LAYER):
            console.print(table(f"{name}, {TITLE}: {what}, {gpu.name}", name, what, figures["rows"]))
    return figures


def jobs(
    models: Sequence[str],
    ways: Sequence[str],
    batches: Sequence[int],
    contexts: tuple[int, ...],
    prompts: tuple[int, ...],
) -> list[Job]:
    """All there is to measure; prompts run eagerly in both ways of transformers, and so in one of them."""
    found = []
    for name in models:
        for way in ways:
            found += [Job(name, way, DECODE, batch, contexts) for batch in batches]
            if way != TheirsCompiled.name:
                found += [Job(name, way, what, 1, prompts) for what in (PREFILL, LAYER)]
    return found


def measured(job: Job) -> list[dict[str, Any]]:
    """A row of figures for each number of tokens; ``refused`` says why there is none."""
    gpu, make = timing.Gpu(), attention_layer if job.what == LAYER else whole_model
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        way = WAYS[job.way](make(job.model, gpu.device), gpu, job.batch, job.tokens[-1])
        for tokens in job.tokens:
            try:
                found = way.decode(tokens) if job.what == DECODE else way.prefill(tokens)
            except torch.OutOfMemoryError:
                found = {"refused": "out of memory"}
            gpu.release()
            rows.append({**asdict(job), "tokens": tokens, **found})
    return rows


def table(title: str, name: str, what: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds by way, and how many times as long as ours."""
    of_this = [row for row in rows if (row["model"], row["what"]) == (name, what)]
    places = list(dict.fromkeys((row["batch"], row["tokens"]) for row in of_this))
    made = Table(title=title, caption="ms, and times as long as dsa_compile")
    made.add_column("batch x tokens")
    found = {(row["way"], row["batch"], row["tokens"]): row for row in of_this}
    ways = list(dict.fromkeys(row["way"] for row in of_this))
    for way in ways:
        made.add_column(way, justify="right")
    for batch, tokens in places:
        ours = found.get((Ours.name, batch, tokens), {}).get("us")
        cells = [cell(found.get((way, batch, tokens), {}), ours) for way in ways]
        made.add_row(f"{batch} x {tokens / 1024:g}K", *cells)
    return made


def cell(row: dict[str, Any], ours: float | None) -> str:
    if "us" not in row:
        return str(row.get("refused", ""))
    times = f" {row['us'] / ours:.2f}x" if ours and row["way"] != Ours.name else ""
    return f"{row['us'] / 1e3:.3f}{times}"
