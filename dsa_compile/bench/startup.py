"""``dsa-compile bench startup``: how long a model takes to its first tokens."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.generation.streamers import BaseStreamer

from dsa_compile.api import optimize
from dsa_compile.bench.apart import apart
from dsa_compile.bench.model_sizes import LAYERS, MODELS, title, whole_model
from dsa_compile.bench.plan_slice import check_slices
from dsa_compile.models.miniature import miniature
from dsa_compile.report import recent_reports

PROMPT, NEW_TOKENS = 16, 3
STEPS = ("optimize", "first prefill", "first decode step", "second decode step")
COLD, WARM = "cold", "warm"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Marks(BaseStreamer):
    """When ``generate`` began and when each of its tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def startup(
    layers: int, lowering: str, *, model: str | None = None, fresh: bool = False, out: Path | None = None
) -> dict[str, Any]:
    """Seconds that a model takes to optimize, prefill 16 tokens and decode two.

    Args:
        layers: of a DeepSeek-V3.2 miniature (61: DeepSeek-V3.2's own depth), in bfloat16 on a GPU.
        model: of `MODELS`, in its own widths and `LAYERS` layers, instead. lowering: as of `DSAConfig`.
        fresh: start over empty caches of Inductor and Triton in a process of its own, then in a second process.
        out: a JSON file for the figures.

    Returns:
        The figures: ``seconds`` of each step, ``bodies`` that were compiled of each graph; ``warm``, the same of the
        second process.

    Raises:
        ConfigError: the model is unknown.
    """
    check_slices([model] if model else [], list(MODELS))
    figures = _fresh(layers, lowering, model) if fresh else measured(layers, lowering, model)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    what = f"{model}, {title(model)}" if model else f"{layers}-layer DeepSeek-V3.2 miniature"
    Console().print(_table(f"{what}, {lowering}, {figures['device']}", figures))
    return figures


def measured(layers: int, lowering: str, name: str | None) -> dict[str, Any]:
    """The figures of a start in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name is not None:
        model = whole_model(name, device)
    else:
        model = miniature("deepseek_v32", num_hidden_layers=layers).to(device)  # type: ignore[arg-type]
        model = model.to(torch.bfloat16) if device.type == "cuda" else model
    ids, marks, before = torch.arange(3, 3 + PROMPT, device=device)[None], Marks(), {*map(id, recent_reports())}
    start = time.perf_counter()
    optimize(model, lowering=lowering)
    optimized = time.perf_counter() - start
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=marks,
    )
    waited = [after - before for before, after in zip(marks.times, marks.times[1:])]
    return {
        "layers": LAYERS if name else layers,
        "model": name,
        "lowering": lowering,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "seconds": dict(zip(STEPS, [optimized, *waited])),
        "bodies": [report.bodies for report in recent_reports() if id(report) not in before],
    }


def _fresh(layers: int, lowering: str, name: str | None) -> dict[str, Any]:
    before = {key: os.environ.get(key) for key in CACHES}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(dict.fromkeys(CACHES, folder))
        try:
            cold, warm = (apart(measured, layers, lowering, name) for _ in (COLD, WARM))
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
    return {**cold, WARM: {key: warm[key] for key in ("seconds", "bodies")}}


def _table(heading: str, figures: dict[str, Any]) -> Table:
    starts = [figures, figures[WARM]] if WARM in figures else [figures]
    table = Table(title=heading)
    table.add_column("step")
    for head in (COLD, WARM) if len(starts) == 2 else ("seconds",):
        table.add_column(head, justify="right")
    for step in STEPS:
        table.add_row(step, *(f"{start['seconds'][step]:.3f}" for start in starts))
    table.add_row("all", *(f"{sum(start['seconds'].values()):.3f}" for start in starts))
    table.add_row("bodies compiled", *(" + ".join(map(str, start["bodies"])) for start in starts))
    return table
