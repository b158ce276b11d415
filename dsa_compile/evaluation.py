"""`evaluate`: what a model loses where its attention is sparse."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from dsa_compile.answers import answered
from dsa_compile.config import DSAConfig
from dsa_compile.errors import InputError
from dsa_compile.haystack import NeedleSuite, Question
from dsa_compile.models.prepared import EVALUATION
from dsa_compile.plan import Plan
from dsa_compile.plan_figures import PlanFigures, plan_figures
from dsa_compile.record import write_record
from dsa_compile.replanning import Replanned
from dsa_compile.texts import TOKENS_PER_K, plain_tokens, token_rows

SUITE = NeedleSuite()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` measured; rich's ``print`` shows tables.

    Attributes:
        subject: what it is of: weights, selector, K, plan.
        rows: how many the figures are means over.
        dense, own, plan: with attention to everything, under the model's own plan, and under another one that was
            asked for, or None.
        questions: that were asked. answered: for each of these runs, by name, which were answered.
    """

    subject: dict[str, Any]
    rows: int
    dense: PlanFigures
    own: PlanFigures
    plan: PlanFigures | None
    questions: tuple[Question, ...]
    answered: dict[str, tuple[bool, ...]]

    @property
    def runs(self) -> dict[str, PlanFigures]:
        """By name."""
        named = {"dense": self.dense, "own": self.own, "plan": self.plan}
        return {name: run for name, run in named.items() if run is not None}

    def title(self, name: str) -> str:
        """Of a run, for people."""
        return {"dense": "dense", "own": "sparse", "plan": f"plan {self.runs[name].letters}"}[name]

    def recalled(self, name: str, **where: Any) -> tuple[int, int]:
        """Questions that a run answered, and all; those whose ``kind``, ``length`` and ``depth`` are as said."""
        told = [
            answered
            for question, answered in zip(self.questions, self.answered[name])
            if all(getattr(question, field) == value for field, value in where.items())
        ]
        return sum(told), len(told)

    def save(self, path: Path) -> None:
        """Write the figures as JSON, which ``DSAConfig.evaluation`` reads."""
        runs = {
            name: asdict(run) | {"perplexity": run.perplexity, "recalled": sum(self.answered[name])}
            for name, run in self.runs.items()
        }
        questions = [
            {"kind": question.kind, "length": question.length, "depth": question.depth}
            | {name: answered[place] for name, answered in self.answered.items()}
            for place, question in enumerate(self.questions)
        ]
        write_record(path, EVALUATION, self.subject, {"rows": self.rows, **runs, "questions": questions})

    def __rich__(self) -> Group:
        index_topk = self.subject["index_topk"]
        layers = [
            run.table(f"{self.title(name)}: attention past K = {index_topk}")
            for name, run in self.runs.items()
            if name != "dense"
        ]
        return Group(*layers, self._total_table(), *([self._question_table()] if self.questions else []))

    def _total_table(self) -> Table:
        table = Table(title=f"{self.rows:,} tokens of text past K")
        for name in ("", "loss", "over dense", "perplexity", "next token as dense"):
            table.add_column(name, justify="right" if name else "left")
        for name, run in self.runs.items():
            over = f"{run.loss / self.dense.loss - 1:+.2%}"
            table.add_row(self.title(name), f"{run.loss:.4f}", over, f"{run.perplexity:.3f}", f"{run.agreement:.2%}")
        return table

    def _question_table(self) -> Table:
        table = Table(title="codes recalled")
        table.add_column("planted")
        table.add_column("tokens", justify="right")
        for name in self.runs:
            table.add_column(self.title(name), justify="right")
        for kind, length in dict.fromkeys((question.kind, question.length) for question in self.questions):
            told = [self.recalled(name, kind=kind, length=length) for name in self.runs]
            table.add_row(kind, f"{length:,}", *(f"{right} of {asked}" for right, asked in told))
        return table


def evaluate(
    model: nn.Module,
    texts: Sequence[str | Tensor],
    config: DSAConfig | None = None,
    *,
    needles: NeedleSuite | None = SUITE,
    tokens: int | None = None,
    tokenizer: Any = None,
    progress: bool = False,
    **fields: Any,
) -> Evaluation:
    """Measure a sparse model beside the same model with dense attention, where queries see more than K tokens.

    Losses and attention are teacher-forced on graphs that run uncompiled and without a cache; questions are answered by
    `generate` over a latent cache, greedily.

    Args:
        model: a stock model of a supported family; stays as it is.
        texts: see `token_rows`; needles are planted in them.
        config: options as for `optimize`; ``fields`` replace single ones. A ``plan`` is measured beside the model's
            own.
        needles: questions to ask, which need the ``tokenizer``; None: none.
        tokens: of a row; see `token_rows`. tokenizer: for needles, and for texts that are strings.
        progress: show a bar on stderr.

    Raises:
        ConfigError: an option is out of range, or the plan does not fit the model.
        InputError: the texts are none or too short, or there is no tokenizer.
        UnsupportedModelError, IndexerWeightsError, CheckpointError: as of `optimize`.
    """
    options = DSAConfig.of(config, **fields)
    if needles is not None and tokenizer is None:
        raise InputError("needles: they are text and need tokenizer=; or ask none, needles=None.")
    replanned = Replanned(model, options)
    dsa, plan = replanned.model.dsa, replanned.plan(options.plan, options.layer0)
    rows = token_rows(texts, tokenizer, tokens, dsa.index_topk)
    questions: list[Question] = []
    if needles is not None:
        haystack = torch.cat(
            [text.cpu() if isinstance(text, Tensor) else plain_tokens(tokenizer, text) for text in texts]
        )
        questions = needles.questions(haystack, tokenizer, tokens or TOKENS_PER_K * dsa.index_topk)
    plans = {"dense": Plan((None,) * len(plan.sources)), "own": replanned.own}
    if plan != replanned.own:
        plans["plan"] = plan
    figures: dict[str, PlanFigures] = {}
    answers: dict[str, tuple[bool, ...]] = {}
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("measuring", total=len(plans) * (len(rows) + len(questions)))
        expected: list[Tensor] | None = None
        for name, planned in plans.items():
            figures[name], likeliest = plan_figures(replanned, planned, rows, lambda: bar.advance(task), expected)
            expected = expected or likeliest
            under = DSAConfig.of(options, plan=planned.text(), layer0="serial", evaluation=None)
            answers[name] = answered(questions, model, under, tokenizer, lambda: bar.advance(task))
    return Evaluation(
        subject=dsa.subject() | {"plan": list(plan.text())},
        rows=sum(len(ids) - dsa.index_topk - 1 for ids in rows),
        dense=figures["dense"],
        own=figures["own"],
        plan=figures.get("plan"),
        questions=tuple(questions),
        answered=answers,
    )
