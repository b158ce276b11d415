"""``dsa-compile bench mtp --slice``: the step of a large model's slice by drafts, and when they pay.

Random weights accept nothing, so that a step is timed by itself; what must be accepted follows from the times.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dsa_compile.api import optimize
from dsa_compile.bench import timing
from dsa_compile.bench.apart import apart
from dsa_compile.bench.plan_slice import SLICES, TUNED, Setting, check_slices, fill, held
from dsa_compile.config import CacheConfig, MTPConfig
from dsa_compile.cost.speculation import expected_tokens
from dsa_compile.models.family import family_of
from dsa_compile.models.mtp import new_mtp_layer
from dsa_compile.models.mtp_step import Place
from dsa_compile.sampling import Sampling

CONTEXTS = (4 << 10, 32 << 10, 128 << 10)
CLOSE = 0.25
"""How far below the best logit of a plain step that of a step's token may be, in standard deviations of the logits.

That of another token is three of them below; bfloat16 is not the same to the bit for another number of rows.
"""


@dataclass
class Row:
    """Steps that verify ``drafts``. ``us``: of one, by context; ``refused``: why there is none."""

    drafts: int
    us: dict[int, float] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class DraftSetting(Setting):
    """``layers`` are without the MTP layer. ``drafts``: in any row."""

    drafts: tuple[int, ...]


def mtp_steps(
    slices: Sequence[str],
    batches: Sequence[int] = (1, 8, 32),
    contexts: Sequence[int] = CONTEXTS,
    drafts: Sequence[int] = (0, 1, 2, 3),
    layers: int = 32,
    experts: bool = False,
    mode: str = TUNED,
    out: Path | None = None,
) -> dict[str, Any]:
    """Time steps in CUDA graphs on the current GPU, and print a table for each slice and batch.

    A step of M drafts verifies M + 1 tokens of each sequence, accepts, and drafts M more, all in one graph. That of
    none is plain decoding, without an MTP layer; it always runs.

    Args:
        slices: of `SLICES`. contexts: tokens of each sequence, the last one included. mode: of ``torch.compile``.
        out: a JSON file for the figures, written after each row.

    Returns:
        The figures; ``"wrong"`` names the rows that continue other than plain decoding does. They have no times.

    Raises:
        ConfigError: a slice is unknown, or there is no GPU.
    """
    check_slices(slices, list(SLICES))
    gpu, progress = timing.Gpu(), Console(stderr=True)
    figures: dict[str, Any] = {"device": gpu.name, "torch": torch.__version__, "settings": [], "wrong": []}
    counts = tuple(sorted({0, *drafts}))
    for name, batch in ((name, batch) for name in slices for batch in batches):
        setting, rows = DraftSetting(name, layers, batch, experts, tuple(sorted(contexts)), mode, counts), list[Row]()
        figures["settings"].append(entry := {**asdict(setting), "rows": []})
        plain = torch.empty(0)
        for count in counts:
            progress.print(f"{setting.title}: {count} drafts", style="dim")
            row, output = apart(measured, setting, count)
            if count == 0:
                plain = output
            elif not row.refused and plain.numel() and not continues(plain, output):
                row = Row(count, refused="wrong")
                figures["wrong"].append(f"{setting.title}: {count} drafts")
            rows.append(row)
            entry["rows"].append({**asdict(row), "break_even": break_even(rows[0], row)})
            if out is not None:
                out.write_text(json.dumps(figures, indent=1) + "\n")
        Console(width=None if sys.stdout.isatty() else 160).print(table(setting, rows, gpu.name))
    return figures


def measured(setting: DraftSetting, drafts: int) -> tuple[Row, Tensor]:
    """Steps over a cache that holds the longest context, each in one CUDA graph.

    With them, for each context, the logits [contexts, B, vocab] of a plain step, or the tokens [contexts, B] behind the
    last one by a step with drafts.
    """
    row, longest, gpu = Row(drafts), max(setting.contexts), timing.Gpu()
    torch.manual_seed(0)
    try:
        model = SLICES[setting.slice].model(setting.layers, setting.experts, gpu.device)
        mtp = MTPConfig(drafts=drafts, module=random_layer(model)) if drafts else None
        optimize(model, mtp=mtp, mode=setting.mode, cache=CacheConfig(index_dtype="fp8"))
        cache = model.make_cache(setting.batch, longest + 2 * max(setting.drafts))
        fill(cache)
        lengths = held(cache, longest - 1)
        place = Place(lengths[0], torch.ones_like(lengths[0], dtype=torch.bool), torch.zeros_like(lengths[0]))
        tokens = torch.full((setting.batch, drafts + 1), 3, device=gpu.device)
        uniforms, greedy = torch.zeros(tokens.shape, device=gpu.device), Sampling(greedy=True)

        def decode(tokens: Tensor) -> tuple[Tensor]:
            cache.lengths.valid, cache.lengths.seen, cache.lengths.bound = lengths
            return (model(tokens, past_key_values=cache).logits[:, 0],)

        def speculate(tokens: Tensor) -> tuple[Tensor]:
            block, *_ = model.dsa_guard.compiled.graphs(drafts + 1).step(model, cache, tokens, place, greedy, uniforms)
            return (block[:, 0],)

        with torch.no_grad():
            recording = gpu.record(speculate if drafts else decode, [(tokens,)])
        outputs = []
        for context in setting.contexts:
            lengths[0].fill_(context - 1)
            row.us[context] = gpu.time(recording).median
            outputs.append(recording.outputs[0][0].cpu())
        return row, torch.stack(outputs)
    except torch.OutOfMemoryError:
        return Row(drafts, refused="out of memory"), torch.empty(0)


def random_layer(model: Any) -> nn.Module:
    """An MTP layer for a stock model, with weights like those of `dsa_compile.bench.plan_slice.Slice.model`."""
    layer: nn.Module = new_mtp_layer(model, family_of(model)).to_empty(device=model.device)
    with torch.no_grad():
        for buffer in layer.buffers():
            buffer.zero_()
        for parameter in layer.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return layer


def continues(plain: Tensor, tokens: Tensor) -> bool:
    """Whether tokens [contexts, B] are the best of logits [contexts, B, vocab], or as good as these; see `CLOSE`."""
    logits = plain.float()
    short = logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]
    return bool((short <= CLOSE * logits.std(-1)).all())


def break_even(plain: Row, row: Row) -> dict[int, float | None]:
    """By context, how often each draft must be accepted, once those before it are, to lose nothing.

    None where even drafts that are always right lose.
    """
    return {
        context: _acceptance(row.us[context] / plain.us[context], row.drafts)
        for context in row.us
        if context in plain.us
    }


def _acceptance(tokens: float, drafts: int) -> float | None:
    """The rate at which a step yields so many tokens."""
    low, high = 0.0, 1.0
    if tokens > 1 + drafts:
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle] * drafts) < tokens else (low, middle)
    return round(high, 6)


def table(setting: DraftSetting, rows: Sequence[Row], device: str) -> Table:
    """Milliseconds of a step, and the acceptance of each draft from which on it beats plain decoding."""
    made = Table(title=f"step, {setting.title}, {device}", caption="ms, and the acceptance that breaks even")
    made.add_column("drafts")
    for context in setting.contexts:
        made.add_column(f"{context / 1024:g}K", justify="right")
    for row in rows:
        needed = break_even(rows[0], row)
        made.add_row(str(row.drafts), *[_cell(row, context, needed.get(context)) for context in setting.contexts])
    return made


def _cell(row: Row, context: int, needed: float | None) -> str:
    if context not in row.us:
        return row.refused
    if row.drafts == 0:
        return f"{row.us[context] / 1e3:.3f}"
    return f"{row.us[context] / 1e3:.3f} {'never' if needed is None else f'{needed:.2f}'}"
