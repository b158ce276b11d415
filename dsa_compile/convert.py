"""`convert`: from a dense checkpoint to a sparse one, and what that costs."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import TrainingArguments

from dsa_compile.config import DEFAULT_INDEX_TOPK, DSAConfig
from dsa_compile.distillation import Warmup, warmup
from dsa_compile.errors import ConfigError
from dsa_compile.export import check_place, save_checkpoint
from dsa_compile.plan import Plan
from dsa_compile.plan_figures import PlanFigures, plan_figures
from dsa_compile.replanning import Replanned
from dsa_compile.student import check_learning
from dsa_compile.texts import TOKENS_PER_K, packed_rows


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `convert` made; rich's ``print`` shows tables.

    Attributes:
        model_type: of the checkpoint. warmed: its indexers. rows: of tokens that no indexer was trained on.
        dense, exact, sparse: figures past K on those rows of the model as it came, with attention to everything, and
            as it is written, under the plan, to the selections of most attention, which no indexer for a layer alone
            can beat, and to those of the indexers.
    """

    model_type: str
    warmed: Warmup
    rows: int
    dense: PlanFigures
    exact: PlanFigures
    sparse: PlanFigures

    def __rich__(self) -> Group:
        return Group(self._layer_table(), self._total_table())

    def _layer_table(self) -> Table:
        table = Table(title=f"plan {self.sparse.letters}, K = {self.warmed.index_topk}")
        for name in ("layer", "", "divergence", "mass kept", "exact selection", "share of it"):
            table.add_column(name, justify="right")
        shares = [kept / best for kept, best in zip(self.sparse.mass, self.exact.mass)]
        for layer, (nats, kept, best, share) in enumerate(
            zip(self.warmed.divergences, self.sparse.mass, self.exact.mass, shares)
        ):
            figures = ["-" if nats is None else f"{nats:.3f}", *(f"{figure:.3f}" for figure in (kept, best, share))]
            table.add_row(str(layer), self.sparse.letters[layer], *figures)
        for layer, nats in [*enumerate(self.warmed.divergences)][len(shares) :]:
            table.add_row(str(layer), "MTP", "-" if nats is None else f"{nats:.3f}", "-", "-", "-")
        table.add_section()
        table.add_row("mean", "", "", "", "", f"{sum(shares) / len(shares):.3f}")
        return table

    def _total_table(self) -> Table:
        table = Table(title=f"{self.rows} rows that no indexer was trained on")
        for name in ("attention", "loss", "over dense"):
            table.add_column(name, justify="right" if name != "attention" else "left")
        for name, run in {"dense": self.dense, "exact selection": self.exact, "indexer": self.sparse}.items():
            table.add_row(name, f"{run.loss:.4f}", f"{run.loss / self.dense.loss - 1:+.2%}")
        return table


def convert(
    model: Any,
    documents: Sequence[str],
    out: Path,
    config: DSAConfig | None = None,
    *,
    tokenizer: Any,
    steps: int = 1000,
    sparse_steps: int = 0,
    train_all: bool = False,
    learning_rate: float = 5e-3,
    sparse_learning_rate: float | None = None,
    temperature: float = 1.0,
    batch: int = 4,
    tokens: int | None = None,
    isolate: bool = False,
    held_out: int = 2,
    seed: int = 0,
    retrain: bool = False,
    progress: bool = False,
    **fields: Any,
) -> Conversion:
    """Train indexers for a model, write both as a checkpoint, and measure what its sparse attention loses.

    A run that is killed goes on from its last checkpoint, in ``.NAME.warmup`` beside ``out``.

    Args:
        model: a stock model of a supported family; stays as it is, but for ``train_all``. documents, isolate: see
            `packed_rows`.
        out: see `save_checkpoint`. config: options as for `warmup`, ``mtp`` among them; ``fields`` replace single ones.
        steps, learning_rate: of the warm-up, which rises over the first twentieth and falls as a cosine.
        sparse_steps: of a second stage, in which layers attend to what the indexers select. train_all: there the model
            learns too, and is what is written; see `warmup`. sparse_learning_rate: of that stage; None: a tenth of the
            other, or where the model learns 1e-5, GLM-5's (arXiv 2602.15763).
        temperature: of the attention that indexers learn, at least 1, which is DeepSeek-V3.2's; see `warmup`.
        batch: rows of a step. tokens: of a row; None: 4 K. seed: of the first indexers and the order of rows.
        held_out: rows that are measured and not trained on. retrain: go on from indexers that the model has.
        progress: show bars on stderr.

    Raises:
        ConfigError: an option is out of range, or there is no accelerate. InputError: the documents are too short.
        TrainingError, CheckpointError, UnsupportedModelError, IndexerWeightsError: see `warmup` and `save_checkpoint`.
    """
    if find_spec("accelerate") is None:
        raise ConfigError("convert: expected accelerate, which trains, found none. pip install 'dsa_compile[train]'.")
    if sparse_learning_rate is None:
        sparse_learning_rate = 1e-5 if train_all else learning_rate / 10
    rates = {"learning_rate": learning_rate, "sparse_learning_rate": sparse_learning_rate}
    for name, value in {"steps": steps, "batch": batch, "held_out": held_out, **rates}.items():
        if value <= 0:
            raise ConfigError(f"{name}: expected more than 0, came {value}.")
    if sparse_steps < 0:
        raise ConfigError(f"sparse_steps: expected at least 0, came {sparse_steps}.")
    if train_all:
        check_learning(model, sparse_steps > 0)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "convert: expected one process, came several. Call dsa_compile.warmup in each, and save_checkpoint in one."
        )
    options = DSAConfig.of(config, **fields)
    check_place(model, out)
    index_topk = options.index_topk or getattr(model.config, "index_topk", None) or DEFAULT_INDEX_TOPK
    rows = packed_rows(documents, tokenizer, tokens or TOKENS_PER_K * index_topk, isolate=isolate)
    if len(rows) <= held_out:
        raise ConfigError(
            f"held_out: expected fewer than the {len(rows)} rows that the documents make, came {held_out}."
        )
    work = out.absolute().with_name(f".{out.name}.warmup")
    shared = {
        "per_device_train_batch_size": batch,
        "lr_scheduler_type": "cosine",
        "adam_beta2": 0.98,
        "save_total_limit": 2,
        "seed": seed,
        "use_cpu": model.device.type == "cpu",
        "disable_tqdm": not progress,
        "report_to": [],
    }
    arguments = _arguments(work / "dense", steps, learning_rate, shared)
    warmed = warmup(model, rows[:-held_out], arguments, options, temperature=temperature, retrain=retrain)
    measure = _Measure(model, warmed, [row["input_ids"] for row in rows[-held_out:]], progress)
    dense = measure(Plan((None,) * len(warmed.plan.sources)), selector="attention")
    if sparse_steps:
        options = DSAConfig.of(options, indexer=warmed.indexers, plan=warmed.plan.text(), layer0="serial")
        arguments = _arguments(work / "sparse", sparse_steps, sparse_learning_rate, shared)
        warmed = warmup(
            model,
            rows[:-held_out],
            arguments,
            options,
            sparse=True,
            train_all=train_all,
            temperature=temperature,
            retrain=True,
        )
    model_type = save_checkpoint(model, warmed, out, tokenizer=tokenizer)
    shutil.rmtree(work)
    exact, sparse = measure(warmed.plan, selector="attention"), measure(warmed.plan, indexer=warmed.indexers)
    return Conversion(model_type=model_type, warmed=warmed, rows=held_out, dense=dense, exact=exact, sparse=sparse)


def _arguments(folder: Path, steps: int, learning_rate: float, shared: dict[str, Any]) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        max_steps=steps,
        learning_rate=learning_rate,
        warmup_steps=steps // 20,
        logging_steps=max(1, steps // 20),
        save_steps=max(1, steps // 10),
        **shared,
    )


@dataclass(frozen=True)
class _Measure:
    """Figures of the model, as it is when called, on ``rows``."""

    model: Any
    warmed: Warmup
    rows: list[Tensor]
    progress: bool

    def __call__(self, plan: Plan, **selection: Any) -> PlanFigures:
        options = DSAConfig.of(index_topk=self.warmed.index_topk, plan=self.warmed.plan.text(), **selection)
        with Progress(console=Console(stderr=True), disable=not self.progress) as bar:
            task = bar.add_task("measuring", total=len(self.rows))
            return plan_figures(Replanned(self.model, options), plan, self.rows, lambda: bar.advance(task))[0]
