"""``dsa-compile bench mtp --checkpoint``: tokens per second of generation with drafts and without."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

from dsa_compile.api import optimize
from dsa_compile.bench import timing
from dsa_compile.bench.apart import side_by_side, turn
from dsa_compile.cli.checkpoints import load
from dsa_compile.measure import Clock
from dsa_compile.models.preparation import trained_indexers
from dsa_compile.needles import make_needles
from dsa_compile.texts import encode

THEIRS = "transformers' use_mtp"
WARM_UP = 3
"""Generations before any is timed: to compile, to record CUDA graphs, and to replay them once."""
RUNS = 5


@dataclass
class Row:
    """One way to generate.

    ``rate``: tokens a second of decoding, over the batch; ``refused``: why there is none. ``accept_length``: tokens
    that a step gave a sequence; accepted drafts behind its end are none. ``differs``: its tokens are not ours.
    """

    way: str
    rate: float | None = None
    accept_length: float | None = None
    refused: str = ""
    differs: bool = False


@dataclass(frozen=True)
class Setting:
    """What all ways of a table share. ``context``: tokens of a prompt at least."""

    checkpoint: Path
    batch: int
    context: int
    new_tokens: int
    dtype: str
    mode: str

    @property
    def title(self) -> str:
        return f"{self.checkpoint.name}, batch {self.batch}, context {self.context}, {self.dtype}, {self.mode}"


def mtp(
    checkpoint: Path,
    batches: Sequence[int] = (1, 8),
    contexts: Sequence[int] = (3000,),
    drafts: Sequence[int] = (0, 1, 2, 3),
    new_tokens: int = 128,
    dtype: str = "float32",
    mode: str = "reduce-overhead",
    at_once: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """Generate greedily from needle prompts on the current GPU, and print a table for each batch and context.

    Plain decoding always runs, as what the others' tokens and speeds are held against; at batch 1 so does `THEIRS`.

    Args:
        checkpoint: a folder with a model and its MTP layer. mode: of ``torch.compile``, for ours.
        at_once: ways that compile side by side; they are timed one after another.
        out: a JSON file for the figures, written after each group of these.

    Returns:
        The figures; ``"wrong"`` names our rows whose tokens are not those of plain decoding. They have no speed.
        transformers, which rounds elsewhere, may choose other tokens in bfloat16; then its row says so.

    Raises:
        ConfigError: there is no GPU, or the dtype is unknown. CheckpointError: the folder is no checkpoint.
        MTPWeightsError: it holds no MTP layer.
    """
    gpu, progress = timing.Gpu(), Console(stderr=True)
    figures: dict[str, Any] = {"device": gpu.name, "torch": torch.__version__, "settings": [], "wrong": []}
    for batch, context in ((batch, context) for batch in batches for context in contexts):
        setting, rows = Setting(checkpoint, batch, context, new_tokens, dtype, mode), list[Row]()
        figures["settings"].append(entry := {**asdict(setting), "checkpoint": str(checkpoint), "rows": []})
        plain = torch.empty(0)
        ways = (*dict.fromkeys((0, *drafts)), *([THEIRS] if batch == 1 else []))
        for group in (ways[i : i + at_once] for i in range(0, len(ways), at_once)):
            progress.print(f"{setting.title}: {', '.join(map(str, group))}", style="dim")
            for way, (row, tokens) in zip(group, side_by_side(measured, [(setting, way) for way in group])):
                plain = tokens if way == 0 else plain
                row.differs = not row.refused and plain.numel() > 0 and not torch.equal(tokens, plain)
                if row.differs and way != THEIRS:
                    row = Row(row.way, refused="wrong", differs=True)
                    figures["wrong"].append(f"{setting.title}: {row.way}")
                rows.append(row)
                entry["rows"].append(asdict(row))
            if out is not None:
                out.write_text(json.dumps(figures, indent=1) + "\n")
        Console(width=None if sys.stdout.isatty() else 160).print(table(setting, rows, gpu.name))
    return figures


def measured(setting: Setting, way: int | str) -> tuple[Row, Tensor]:
    """Generation with ``way`` drafts or as `THEIRS`, and the tokens [B, T] that it gives."""
    gpu = timing.Gpu()
    row = Row(way if isinstance(way, str) else f"{way} drafts")
    model = load(setting.checkpoint, setting.dtype, str(gpu.device))
    inputs = prompts(setting, gpu.device)
    arguments: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    steps: list[None] = []
    cache = None
    if way == THEIRS:
        # transformers finds the layer by the pattern of what it left unread
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\."]
        model.model.register_forward_hook(lambda *_: steps.append(None))
        arguments["use_mtp"] = True
    else:
        options: dict[str, Any] = {"mtp": {"drafts": way}} if way else {}
        optimize(model, selector=None if trained_indexers(model) else "dense", mode=setting.mode, **options)
        capacity = inputs["input_ids"].shape[1] + setting.new_tokens + model.dsa.draft_slots
        cache = arguments["past_key_values"] = model.make_cache(setting.batch, capacity)

    def generate() -> tuple[Any, float]:
        """The output, and seconds from the first new token to the last: what the prompt takes varies by more."""
        if cache is not None:
            cache.reset()
        steps.clear()
        clock = Clock()
        output = model.generate(**inputs, **arguments, max_new_tokens=setting.new_tokens, streamer=clock)
        return output, clock.marks[-1] - clock.marks[1]

    try:
        for _ in range(WARM_UP):
            output, _ = generate()
        decoded = setting.batch * (setting.new_tokens - 1)  # the first token of a sequence comes from its prompt
        drafted = getattr(output, "mtp", None)
        row.accept_length = decoded / (drafted.verified if drafted else len(steps) - 1 if steps else decoded)
        with turn():
            row.rate = decoded / median(generate()[1] for _ in range(RUNS))
        return row, output.sequences.cpu()
    except torch.OutOfMemoryError:
        return Row(row.way, refused="out of memory"), torch.empty(0)
    except (RuntimeError, ValueError) as error:
        if way != THEIRS:
            raise
        return Row(row.way, refused=str(error).splitlines()[0][:80]), torch.empty(0)


def prompts(setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` [B, T] of a batch of needle prompts, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(setting.checkpoint, local_files_only=True)
    needles = make_needles(setting.batch, setting.context, lambda text: len(tokenizer(text).input_ids))
    rows = [encode(tokenizer, needle.prompt) for needle in needles]
    longest = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    for place, row in enumerate(rows):
        ids[place, longest - len(row) :], mask[place, longest - len(row) :] = row, 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def table(setting: Setting, rows: Sequence[Row], device: str) -> Table:
    """Tokens a second of decoding, and how many times as fast as plain decoding that is."""
    made = Table(title=f"{setting.title}, {device}", caption="tokens per second of decoding, all sequences together")
    for heading in ("", "tokens/s", "times 0 drafts", "accept length"):
        made.add_column(heading, justify="right" if heading else "left")
    plain = rows[0].rate
    for row in rows:
        if row.rate is None:
            made.add_row(row.way, row.refused)
        else:
            times = f"{row.rate / plain:.2f}x" if plain else ""
            way = f"{row.way}, other tokens" if row.differs else row.way
            made.add_row(way, f"{row.rate:.1f}", times, f"{row.accept_length:.2f}")
    return made
