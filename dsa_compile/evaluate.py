"""`evaluate_plan`: what a plan costs, beside plain sparse and dense attention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from dsa_compile.config import DSAConfig
from dsa_compile.errors import ConfigError, InputError
from dsa_compile.models.prepared import EVALUATION
from dsa_compile.needles import make_needles
from dsa_compile.plan import Plan
from dsa_compile.record import write_record
from dsa_compile.replanning import Replanned
from dsa_compile.texts import TOKENS_PER_K, encode, loss_past_k, token_rows


@dataclass(frozen=True)
class PlanFigures:
    """A model under one plan.

    Attributes:
        loss: mean next-token loss of the rows that see more than K tokens.
        recalled: needles whose code greedy decoding begins with.
        mass: for each layer, of its head-mean attention over everything, what its selection keeps; mean over such rows.
        overlap: for each layer, share of its selection that the layer before attends to as well; None without one.
    """

    letters: str
    loss: float
    recalled: int
    mass: tuple[float, ...]
    overlap: tuple[float | None, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate_plan` measured; rich's ``print`` shows tables.

    Attributes:
        subject: what it is of: weights, selector, K, plan.
        sources: for each layer whose selection it attends to, None for everything.
        rows: how many the losses are means over. needles: how many were asked for.
        dense, own, plan: with attention to everything, under the model's own plan, and under the plan in question.
    """

    subject: dict[str, Any]
    sources: tuple[int | None, ...]
    rows: int
    needles: int
    dense: PlanFigures
    own: PlanFigures
    plan: PlanFigures

    def save(self, path: Path) -> None:
        """Write the figures as JSON, which ``DSAConfig.evaluation`` reads."""
        runs = {name: asdict(run) | {"perplexity": run.perplexity} for name, run in self._runs().items()}
        write_record(path, EVALUATION, self.subject, {"rows": self.rows, "needles": self.needles, **runs})

    def _runs(self) -> dict[str, PlanFigures]:
        return {"dense": self.dense, "own": self.own, "plan": self.plan}

    def __rich__(self) -> Group:
        return Group(self._layer_table(), self._total_table())

    def _layer_table(self) -> Table:
        table = Table(title=f"plan {self.plan.letters} past K = {self.subject['index_topk']}")
        for name in ("layer", "", "attends to", "mass own", "mass plan", "overlap own", "overlap plan"):
            table.add_column(name, justify="right")
        columns = [self.own.mass, self.plan.mass, self.own.overlap, self.plan.overlap]
        for layer, source in enumerate(self.sources):
            letter = self.plan.letters[layer]
            own = "its own" if letter == "F" else "its own, a token late"
            shown = "everything" if source is None else own if source == layer else f"layer {source}"
            cells = [_share(column[layer]) for column in columns]
            table.add_row(str(layer), letter, shown, *cells)
        table.add_section()
        table.add_row("mean", "", "", *(_share(_mean(column)) for column in columns))
        return table

    def _total_table(self) -> Table:
        table = Table(title=f"{self.rows:,} rows of text, {self.needles} needles")
        for name in ("", "loss", "perplexity", "needles recalled"):
            table.add_column(name, justify="right" if name else "left")
        for name, run in self._runs().items():
            table.add_row(name, f"{run.loss:.4f}", f"{run.perplexity:.3f}", f"{run.recalled} of {self.needles}")
        return table


def evaluate_plan(
    model: nn.Module,
    texts: Sequence[str | Tensor],
    config: DSAConfig | None = None,
    *,
    needles: int = 10,
    tokens: int | None = None,
    tokenizer: Any = None,
    progress: bool = False,
    **fields: Any,
) -> Evaluation:
    """Measure the plan that the options name, teacher-forced, where queries see more than K tokens.

    Args:
        model: a stock model of a supported family; stays as it is. texts: see `token_rows`.
        config: options as for `optimize`; ``fields`` replace single ones. Graphs run uncompiled, without a cache.
        needles: prompts with planted codes to ask, of ``tokens`` tokens; they need the ``tokenizer``.
        tokens: of a row; see `token_rows`. tokenizer: for needles, and for texts that are strings.
        progress: show a bar on stderr.

    Raises:
        ConfigError: an option is out of range, or the plan does not fit the model.
        InputError: the texts are none or too short, or there is no tokenizer.
        UnsupportedModelError, IndexerWeightsError, CheckpointError: as of `optimize`.
    """
    options = DSAConfig.of(config, **fields)
    if needles < 0:
        raise ConfigError(f"needles: expected at least 0, came {needles}.")
    if needles and tokenizer is None:
        raise InputError("needles: they are text and need tokenizer=; or ask none, needles=0.")
    replanned = Replanned(model, options)
    dsa, plan = replanned.model.dsa, replanned.plan(options.plan, options.layer0)
    rows = token_rows(texts, tokenizer, tokens, dsa.index_topk)
    asked = _needle_rows(needles, tokens or TOKENS_PER_K * dsa.index_topk, tokenizer)
    plans = Plan((None,) * len(plan.sources)), replanned.own, plan
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("measuring", total=len(plans) * (len(rows) + len(asked)))
        dense, own, wanted = (plan_figures(replanned, p, rows, asked, lambda: bar.advance(task)) for p in plans)
    return Evaluation(
        subject=dsa.subject() | {"plan": list(plan.text())},
        sources=plan.sources,
        rows=sum(len(ids) - dsa.index_topk - 1 for ids in rows),
        needles=needles,
        dense=dense,
        own=own,
        plan=wanted,
    )


def plan_figures(
    replanned: Replanned,
    plan: Plan,
    rows: Sequence[Tensor],
    asked: Sequence[tuple[Tensor, int]],
    advance: Callable[[], None],
) -> PlanFigures:
    """Figures of a model under a plan.

    Args:
        rows: int64[T] each, longer than K + 1. asked: prompts with their answers behind them, and the answers' lengths.
        advance: called behind each of both.
    """
    index_topk = replanned.model.dsa.index_topk
    loss, figures = 0.0, torch.zeros(len(plan.sources), 2, dtype=torch.float64)
    for ids in rows:
        logits, part = replanned.measured(ids, plan)
        loss += loss_past_k(logits, ids, index_topk)[0]
        figures += part.cpu()
        advance()
    recalled = 0
    for ids, answer in asked:
        said = replanned.logits(ids, plan)[-answer - 1 : -1].argmax(-1).cpu()
        recalled += torch.equal(said, ids[-answer:])
        advance()
    past = sum(len(ids) - index_topk for ids in rows)
    mass, overlap = (figures / past).T.tolist()
    return PlanFigures(
        letters=plan.letters,
        loss=loss / (past - len(rows)),
        recalled=recalled,
        mass=tuple(mass),
        overlap=tuple(None if math.isnan(share) else share for share in overlap),
    )


def _needle_rows(needles: int, tokens: int, tokenizer: Any) -> list[tuple[Tensor, int]]:
    """Prompts with their answers behind them, int64[T], and how many tokens the answer has."""
    made = make_needles(needles, tokens, lambda text: len(tokenizer(text).input_ids))
    answers = [torch.tensor(tokenizer(f" {needle.code}", add_special_tokens=False).input_ids) for needle in made]
    return [(torch.cat([encode(tokenizer, n.prompt), answer]), len(answer)) for n, answer in zip(made, answers)]


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
