"""What ``dsa-compile bench`` does with a kernel: check it first, then time what is right beside its peers."""

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from dsa_compile.bench import timing
from dsa_compile.bench.cases import Case
from dsa_compile.bench.table import Column, Row, table
from dsa_compile.bench.timing import Ceilings, Gpu, Launch, Recording
from dsa_compile.config import nearest
from dsa_compile.errors import ConfigError

C = TypeVar("C", bound=Case)


class Verdict(Protocol):
    """What a check found: its attributes are figures of the row."""

    @property
    def right(self) -> bool: ...


Check = Callable[[C, Sequence[Any], Sequence[tuple[Tensor, ...]]], Verdict]
"""Of a case, its sets of inputs, and what a launch wrote for each of them."""


@dataclass(frozen=True)
class Peer(Generic[C]):
    """Another implementation of what a case asks for. ``arguments``: what its launch takes of a set of inputs."""

    name: str
    launch: Launch
    check: Check[C]
    arguments: Callable[[Any], tuple[Any, ...]] = lambda inputs: inputs


@dataclass(frozen=True)
class Bench(Generic[C]):
    """A benchmark of kernels.

    Attributes:
        record: records ours over sets of inputs; what else it finds are figures of the row.
        peers: those that are installed and serve a case.
        settings: what was chosen for all cases. note: what a reader of the times must know.
    """

    title: str
    cases: Sequence[C]
    record: Callable[[C, Sequence[Any], Gpu], tuple[Recording, Row]]
    check: Check[C]
    columns: Sequence[Column]
    peers: Callable[[C], Iterable[Peer[C]]] = lambda case: ()
    settings: dict[str, str] = field(default_factory=dict)
    note: str = ""


def run(bench: Bench[C], names: Sequence[str] | None, out: Path | None) -> dict[str, Any]:
    """Check and time cases on the current GPU, and print a table.

    Args:
        names: of the bench's cases; None: all.
        out: a JSON file for the figures, written after each case.

    Returns:
        The figures; ``"wrong"`` names the cases whose result is not right, which have no speed.

    Raises:
        ConfigError: a case is unknown, or there is no GPU that can run them.
    """
    cases = _cases_of(bench.cases, names)
    gpu, progress = timing.Gpu(), Console(stderr=True)
    with torch.no_grad():
        ceilings = gpu.ceilings(fp8=any(case.fp8_products for case in cases))
        figures: dict[str, Any] = {
            "title": bench.title,
            "device": gpu.name,
            "torch": torch.__version__,
            "triton": _version("triton"),
            **bench.settings,
            "ceilings": {name: value for name, value in vars(ceilings).items() if value is not None},
            "cases": [],
            "wrong": [],
        }
        for case in cases:
            progress.print(case.name, style="dim")
            ours, *peers = _figures_of(bench, case, gpu, ceilings)
            figures["cases"] += [ours, *peers]
            figures["wrong"] += [] if ours["right"] else [case.name]
            if out is not None:
                out.write_text(json.dumps(figures, indent=1) + "\n")
    title = ", ".join([bench.title, *bench.settings.values(), gpu.name])
    caption = f"ceilings: {ceilings}" + (f"; {bench.note}" if bench.note else "")
    printed = table(title, caption, bench.columns, figures["cases"])
    Console(width=None if sys.stdout.isatty() else 160).print(printed)
    return figures


def _cases_of(cases: Sequence[C], names: Sequence[str] | None) -> list[C]:
    """The cases of these names, each once; all for None."""
    known = {case.name: case for case in cases}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--case: unknown case {name!r}; {nearest(name, list(known), 'cases')}")
    return list(known.values()) if names is None else [known[name] for name in dict.fromkeys(names)]


def _figures_of(bench: Bench[C], case: C, gpu: Gpu, ceilings: Ceilings) -> list[Row]:
    """A row of ours, and one of each peer."""
    sets = [case.inputs(gpu.device, seed) for seed in range(case.sets)]
    recording, details = bench.record(case, sets, gpu)
    ours = {"case": case.name, "peer": None, **_judged(bench.check, case, sets, recording, gpu, ceilings), **details}
    del recording
    peers = [_peer(peer, case, sets, gpu, ceilings) for peer in bench.peers(case)]
    for row in peers:
        if "us" in row and "us" in ours:
            row["speedup"] = row["us"] / ours["us"]
    if case.targets:
        ours["target"] = ", ".join(map(str, case.targets))
        ours["met"] = ours["right"] and all(target.met([ours, *peers]) for target in case.targets)
    del sets
    gpu.release()
    return [ours, *peers]


def _peer(peer: Peer[C], case: C, sets: Sequence[Any], gpu: Gpu, ceilings: Ceilings) -> Row:
    """Of a peer that cannot serve the call, why."""
    row = {"case": case.name, "peer": peer.name}
    try:
        recording = gpu.record(peer.launch, [peer.arguments(inputs) for inputs in sets])
    except (ImportError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        return {**row, "refused": str(error).split("\n")[0]}
    return {**row, **_judged(peer.check, case, sets, recording, gpu, ceilings)}


def _judged(check: Check[C], case: C, sets: Sequence[Any], recording: Recording, gpu: Gpu, ceilings: Ceilings) -> Row:
    """What a check finds in what a recording writes and, if that is right, its speed."""
    verdict = check(case, sets, recording.rewritten())
    figures = {**vars(verdict), "right": verdict.right}
    if not verdict.right:
        return figures
    times = gpu.time(recording)
    tflops, gbytes = case.flops / times.median / 1e6, case.bytes / times.median / 1e3
    speed = {"us": times.median, "us_10": times.low, "us_90": times.high, "tflops": tflops, "gbytes": gbytes}
    return {**figures, **speed, "share": ceilings.share(tflops, gbytes, case.fp8_products)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
