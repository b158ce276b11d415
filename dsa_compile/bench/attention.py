"""``dsa-compile bench attention``: sparse MLA attention against float64 first, and what is right against the clock."""

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsa_compile.bench import attention_runs as runs
from dsa_compile.bench import timing
from dsa_compile.bench.attention_cases import CASES, Case, Inputs
from dsa_compile.bench.attention_check import checked
from dsa_compile.bench.timing import Ceilings, Gpu, Recording
from dsa_compile.config import DSAConfig, nearest
from dsa_compile.errors import ConfigError

TEXTS = ("case", "target", "configuration")
COLUMNS = ("case", "time us", "10-90 %", "TFLOP/s", "GB/s", "of ceiling", "error", "eager's", "target", "configuration")


def attention(
    names: Sequence[str] | None = None, lowering: str = "inductor", out: Path | None = None
) -> dict[str, Any]:
    """Check, then time ``dsa::sparse_mla`` on the current GPU, and print a table.

    Args:
        names: of `CASES`; None: all.
        lowering: ``"inductor"`` runs what `torch.compile` makes of the op, ``"eager"`` the op as it stands.
        out: a JSON file for the figures, written after each case.

    Returns:
        The figures; ``"wrong"`` names the cases whose result is not right, which have no speed.

    Raises:
        ConfigError: a case or the lowering is unknown, or there is no GPU.
    """
    cases, lowering = cases_of(names), DSAConfig(lowering=lowering).lowering
    gpu, progress = timing.Gpu(), Console(stderr=True)
    with torch.no_grad():
        ceilings = gpu.ceilings()
        figures: dict[str, Any] = {
            "device": gpu.name,
            "torch": torch.__version__,
            "triton": _version("triton"),
            "lowering": lowering,
            "ceilings": asdict(ceilings),
            "cases": [],
            "wrong": [],
        }
        for case in cases:
            progress.print(case.name, style="dim")
            ours, *peers = figures_of(case, lowering, gpu, ceilings)
            figures["cases"] += [ours, *peers]
            figures["wrong"] += [] if ours["right"] else [case.name]
            if out is not None:
                out.write_text(json.dumps(figures, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 160).print(_table(figures))
    return figures


def cases_of(names: Sequence[str] | None) -> list[Case]:
    """The cases of these names, each once; all for None. Raises ConfigError for an unknown one."""
    known = {case.name: case for case in CASES}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--case: unknown case {name!r}; {nearest(name, list(known), 'cases')}")
    return list(known.values()) if names is None else [known[name] for name in dict.fromkeys(names)]


def figures_of(case: Case, lowering: str, gpu: Gpu, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row of ours, and one of a peer that is installed and serves the case."""
    sets = [case.inputs(gpu.device, seed) for seed in range(case.sets)]
    with runs.fresh_caches() as folder:
        recording = gpu.record(runs.op if lowering == "eager" else runs.compiled(), sets)
        picked = runs.eager_configuration(sets[0]) if lowering == "eager" else runs.inductor_configuration(folder)
        ours = {"case": case.name, "peer": None, **_judged(case, sets, recording, gpu, ceilings)}
    del recording
    ours["configuration"] = picked
    if case.target is not None:
        ours["target"] = str(case.target)
        ours["met"] = ours["right"] and case.target.met(ours["us"], ours["tflops"])
    peer = _peer(case, sets, gpu, ceilings)
    del sets
    gpu.release()
    return [ours, *peer]


def _judged(case: Case, sets: list[Inputs], recording: Recording, gpu: Gpu, ceilings: Ceilings) -> dict[str, Any]:
    """The errors of what a recording writes and, if they are allowed, its speed."""
    check = checked(case, sets, recording)
    if not check.right:
        return {**asdict(check), "right": False}
    times = gpu.time(recording)
    tflops, gbytes = case.flops / times.median / 1e6, case.bytes / times.median / 1e3
    speed = {"us": times.median, "us_10": times.low, "us_90": times.high, "tflops": tflops, "gbytes": gbytes}
    return {**asdict(check), "right": True, **speed, "share": ceilings.share(tflops, gbytes)}


def _peer(case: Case, sets: list[Inputs], gpu: Gpu, ceilings: Ceilings) -> list[dict[str, Any]]:
    """One row or none; of a peer that cannot serve the call, why."""
    found = runs.flash_mla(case)
    if found is None:
        return []
    arguments, call = found
    row = {"case": case.name, "peer": "flash_mla"}
    try:
        recording = gpu.record(call, [arguments(inputs) for inputs in sets])
    except (ImportError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        return [{**row, "refused": str(error).split("\n")[0]}]
    return [{**row, **_judged(case, sets, recording, gpu, ceilings)}]


def _table(figures: dict[str, Any]) -> Table:
    ceilings = figures["ceilings"]
    best = f"ceilings: bf16 matmul {ceilings['tflops']:.0f} TFLOP/s, memory {ceilings['gbytes']:.0f} GB/s"
    table = Table(title=f"sparse MLA attention, {figures['lowering']}, {figures['device']}", caption=best)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in TEXTS else "right")
    for row in figures["cases"]:
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    """What is not right shows its error and no speed."""
    name = row["case"] if row["peer"] is None else f"  {row['peer']}"
    if "refused" in row:
        return [name, *[""] * 8, escape(f"refused: {row['refused']}")]
    errors = [f"{row['error']:.2e}", f"{row['eager_error']:.2e}"]
    target, picked = row.get("target", ""), row.get("configuration", "")
    if not row["right"]:
        return [name, "[bold red]WRONG[/]", "", "", "", "", *errors, target, picked]
    if target and not row["met"]:
        target = f"[red]{target}, missed[/]"
    speed = [f"{row['us']:.1f}", f"{row['us_10']:.1f}-{row['us_90']:.1f}", f"{row['tflops']:.0f}"]
    return [name, *speed, f"{row['gbytes']:.0f}", f"{row['share']:.0%}", *errors, target, picked]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
