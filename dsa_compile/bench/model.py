"""``dsa-compile bench model``: decoding and prompts of a whole model, beside stock transformers."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dsa_compile.bench import timing
from dsa_compile.bench.apart import turn, within
from dsa_compile.bench.kernels import GROUPS, REST
from dsa_compile.bench.model_sizes import MODELS, RANK, attention_layer, title, whole_model
from dsa_compile.bench.model_ways import ERRORS, WAYS, Found, Ours, TheirsCompiled
from dsa_compile.bench.plan_slice import check_slices
from dsa_compile.bench.rows import Rows
from dsa_compile.config import nearest
from dsa_compile.errors import ConfigError

CONTEXTS = (8 << 10, 32 << 10, 128 << 10)
PROMPTS = tuple(1024 << n for n in range(2, 8))
RANK_BATCH = 8
DECODE, PREFILL, LAYER = KINDS = "decode", "prefill", "attention layer"
KEY = ("model", "way", "what", "batch", "tokens")


@dataclass(frozen=True)
class Job:
    """What one process measures: steps over ``tokens`` cached ones, or prompts of as many, shortest first."""

    model: str
    way: str
    what: str
    batch: int
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.model}: {self.what}, batch {self.batch}, {self.way}"


def model(
    models: Sequence[str] = ("deepseek_v32", "deepseek_v32_rank"),
    batches: Sequence[int] = (1, 8, 32),
    contexts: Sequence[int] = CONTEXTS,
    prompts: Sequence[int] = PROMPTS,
    ways: Sequence[str] = tuple(WAYS),
    kinds: Sequence[str] = KINDS,
    seconds: float | None = None,
    at_once: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """Time decode steps, prompts and one attention layer's prompts on the current GPU, and print a table of each.

    Args:
        models: of `MODELS`. batches, contexts: of decoding; a rank's share decodes in batches of `RANK_BATCH`.
        prompts: tokens of a prompt, of one sequence. ways, kinds: the columns of `WAYS` and the tables of `KINDS`.
        seconds: after which what still runs is ended, if ever; what is left is for a later call with the same ``out``.
        at_once: jobs of ours that compile side by side; each is timed alone.
        out: a JSON file for the figures, written after each row; rows that it holds are not measured again.
            `dsa_compile.bench.page` makes a page of it.

    Returns:
        The figures; ``"wrong"`` names the jobs that failed. Nothing here is checked that is not checked elsewhere.

    Raises:
        ConfigError: a model, way or kind is unknown, there is no GPU, or ``out`` holds figures of another.
    """
    check_slices(models, list(MODELS))
    for given, known, what in ((ways, list(WAYS), "way"), (kinds, list(KINDS), "kind")):
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"bench model: unknown {what} {unknown[0]!r}; {nearest(unknown[0], known, f'{what}s')}")
    begun, gpu, progress, wrong = time.monotonic(), timing.Gpu(), Console(stderr=True), list[str]()
    with _file(out) as path:
        rows = Rows(path, header(gpu), KEY)
        asked = jobs(models, ways, batches, tuple(sorted(contexts)), tuple(sorted(prompts)))
        for group in groups([job for job in asked if job.what in kinds], at_once):
            jobs_left = [job for job in (missing(job, rows) for job in group) if job.tokens]
            left = None if seconds is None else begun + seconds - time.monotonic()
            if not jobs_left or (left is not None and left <= 0):
                continue
            progress.print("\n".join(map(str, jobs_left)), style="dim")
            codes = within(left, measured, [(job, path) for job in jobs_left])
            wrong += [str(job) for job, code in zip(jobs_left, codes) if code]
        found = rows.all()
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in models:
        for what in KINDS:
            for lines in tables([row for row in found if (row["model"], row["what"]) == (name, what)]):
                console.print(printed(f"{name}, {title(name)}: {what}, {gpu.name}", lines))
    return {**header(gpu), "rows": found, "wrong": wrong}


@contextmanager
def _file(out: Path | None) -> Iterator[Path]:
    """Where rows go: ``out``, or a file that is gone afterwards."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "figures.json"


def header(gpu: timing.Gpu) -> Found:
    return {"device": gpu.name, "torch": torch.__version__}


def jobs(
    models: Sequence[str],
    ways: Sequence[str],
    batches: Sequence[int],
    contexts: tuple[int, ...],
    prompts: tuple[int, ...],
) -> list[Job]:
    """All there is to measure, ours and decoding first; prompts run eagerly in both ways of transformers: in one."""
    found = []
    for way in sorted(ways, key=list(WAYS).index):
        for name in models:
            if not name.endswith(RANK):
                found += [Job(name, way, DECODE, batch, contexts) for batch in batches]
            elif way == Ours.name:
                found.append(Job(name, way, DECODE, RANK_BATCH, contexts))
        if way != TheirsCompiled.name:
            whole = [name for name in models if not name.endswith(RANK)]
            found += [Job(name, way, what, 1, prompts) for name in whole for what in (PREFILL, LAYER)]
    return found


def groups(all_of_them: Sequence[Job], at_once: int) -> list[list[Job]]:
    """Jobs of ours by so many, and each other one alone: what fits there must not depend on neighbours."""
    ours = [job for job in all_of_them if job.way == Ours.name]
    together = [ours[i : i + at_once] for i in range(0, len(ours), at_once)]
    return together + [[job] for job in all_of_them if job.way != Ours.name]


def missing(job: Job, rows: Rows) -> Job:
    """What of a job is not measured yet."""
    return replace(job, tokens=tuple(n for n in job.tokens if rows.lacks({**asdict(job), "tokens": n})))


def measured(job: Job, path: Path) -> None:
    """Add a row of figures for each number of tokens; ``refused`` says why there is none."""
    gpu, make = timing.Gpu(), attention_layer if job.what == LAYER else whole_model
    rows = Rows(path, header(gpu), KEY)
    torch.manual_seed(0)
    with torch.no_grad():
        try:
            way = WAYS[job.way](make(job.model, gpu.device), gpu, job.batch, job.tokens[-1])
            way.compile(job.what == DECODE, job.tokens[0])
        except torch.OutOfMemoryError:
            way = None
        with turn():
            for tokens in job.tokens:
                gpu.release()
                found = figures_of(way, job, tokens)
                rows.add({**asdict(job), "tokens": tokens, **found, "peak_bytes": gpu.peak_bytes()})


def figures_of(way: Any, job: Job, tokens: int) -> Found:
    """What one run of a way gives; of stock transformers, what it says where it cannot run."""
    try:
        if way is None:
            raise torch.OutOfMemoryError
        found: Found = way.decode(tokens) if job.what == DECODE else way.prefill(tokens)
    except torch.OutOfMemoryError:
        return {"refused": "out of memory"}
    except ERRORS as error:
        if job.way == Ours.name:
            raise
        return {"refused": str(error).split("\n")[0]}
    return found


def tables(rows: Sequence[Found]) -> list[list[list[str]]]:
    """Cells of the rows of one model and kind, heads first: times by way, and where the time of ours goes.

    Times are milliseconds, and how many times as long as ours; columns behind those are of ours alone.
    """
    found = {(row["way"], row["batch"], row["tokens"]): row for row in rows}
    ours = {(batch, tokens): row for (way, batch, tokens), row in found.items() if way == Ours.name}
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    besides = [head for head, of in BESIDES.items() if any(of(row, rows) for row in ours.values())]
    times, parts = [["batch", "tokens", *ways, *besides]], [["batch", "tokens", *GROUPS, REST, "no kernel"]]
    for place in sorted({(row["batch"], row["tokens"]) for row in rows}):
        where, own = [str(place[0]), f"{place[1]:,}"], ours.get(place, {})
        cells = [cell(found.get((way, *place), {}), own.get("us")) for way in ways]
        times.append(where + cells + [BESIDES[head](own, rows) for head in besides])
        if "parts" in own:
            parts.append(where + [f"{us / 1e3:.3f}" for us in (*own["parts"].values(), unfilled(own))])
    return [lines for lines in (times, parts) if len(lines) > 1]


def printed(heading: str, lines: Sequence[Sequence[str]]) -> Table:
    made = Table(title=heading)
    for head in lines[0]:
        made.add_column(head, justify="right")
    for line in lines[1:]:
        made.add_row(*line)
    return made


def cell(row: Found, ours: float | None) -> str:
    if "us" not in row:
        return str(row.get("refused", ""))
    times = f" {row['us'] / ours:.2f}x" if ours and row["way"] != Ours.name else ""
    return f"{row['us'] / 1e3:.3f}{times}"


def unfilled(row: Found) -> float:
    """Microseconds that no kernel fills; what two fill beside each other is taken off."""
    filled: float = sum(row["parts"].values())
    return float(row["us"]) - filled


def growth(row: Found, rows: Sequence[Found]) -> str:
    """How many times as long as over the fewest tokens."""
    alike = [r for r in rows if (r["way"], r["batch"]) == (row.get("way"), row.get("batch")) and "us" in r]
    least = min(alike, key=lambda r: r["tokens"], default=row)
    return "" if least is row or "us" not in row else f"{row['us'] / least['us']:.2f}x"


def shown(key: str, unit: float, digits: int) -> Callable[[Found, Sequence[Found]], str]:
    return lambda row, rows: f"{row[key] / unit:.{digits}f}" if key in row else ""


BESIDES = {
    "of its floor": lambda row, rows: f"{row['floor_us'] / row['us']:.0%}" if "floor_us" in row else "",
    "of the shortest": growth,
    "`generate`": shown("generate_us", 1e3, 3),
    "host us": shown("host_us", 1, 0),
    "peak GiB": shown("peak_bytes", 1 << 30, 1),
    "extra GiB": shown("extra_bytes", 1 << 30, 2),
    "graph MiB": shown("graph_bytes", 1 << 20, 1),
    "compile s": shown("compile_s", 1, 1),
}
"""What ours can say besides, of a row among those of its tables: the text of a cell, empty where there is nothing."""
