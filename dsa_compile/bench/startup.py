"""``dsa-compile bench startup``: how long a deep model takes to its first token."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dsa_compile.api import optimize
from dsa_compile.models.miniature import miniature


def startup(layers: int, lowering: str, out: Path | None = None) -> dict[str, Any]:
    """Seconds that a deep DeepSeek-V3.2 miniature takes to optimize, prefill 16 tokens and decode one.

    Args:
        layers: of the miniature (61: DeepSeek-V3.2's own depth). lowering: as of `DSAConfig`.
        out: a JSON file for the figures.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = miniature("deepseek_v32", num_hidden_layers=layers).to(device)  # type: ignore[arg-type]
    marks = [time.perf_counter()]
    optimize(model, lowering=lowering)
    marks.append(time.perf_counter())
    cache = model.make_cache(1, 64)
    ids = torch.arange(3, 19, device=device)[None]
    with torch.no_grad():
        for part in (ids, ids[:, :1], ids[:, :1]):
            model(part, past_key_values=cache).logits.sum().item()
            marks.append(time.perf_counter())
    names = ("optimize", "first prefill", "first decode step", "second decode step")
    seconds = {name: after - before for name, before, after in zip(names, marks, marks[1:])}
    figures = {
        "layers": layers,
        "lowering": lowering,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "seconds": seconds,
    }
    table = Table(title=f"{layers}-layer DeepSeek-V3.2 miniature, {lowering}, {figures['device']}")
    table.add_column("step")
    table.add_column("seconds", justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.3f}")
    table.add_row("up to the first decode step", f"{marks[3] - marks[0]:.3f}")
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    return figures
