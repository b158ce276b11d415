"""`plan_figures`: loss and attention of a model under a plan, where a selection leaves something out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from dsa_compile.plan import Plan
from dsa_compile.replanning import Replanned
from dsa_compile.texts import loss_past_k


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """A model under one plan; all are means over the rows that see more than K tokens, those of a layer in tuples.

    Attributes:
        letters, sources: of the plan; sources are the layers whose selection is attended to, None for everything.
        loss: of the next token.
        agreement: share of the rows whose likeliest next token is that of the dense model.
        mass: of the head-mean attention over everything, what is attended to.
        exact: of the same, what the exact selection keeps, the K tokens that have most; None without a selection.
        recall: share of those K that are attended to.
        overlap: share of the tokens attended to that the layer before attends to as well; None without a selection.
    """

    letters: str
    sources: tuple[int | None, ...]
    loss: float
    agreement: float
    mass: tuple[float, ...]
    exact: tuple[float | None, ...]
    recall: tuple[float, ...]
    overlap: tuple[float | None, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def table(self, title: str) -> Table:
        """Its layers."""
        table = Table(title=title)
        for name in ("layer", "", "attends to", "mass kept", "exact selection", "recall of it", "overlap"):
            table.add_column(name, justify="right")
        columns: tuple[Sequence[float | None], ...] = self.mass, self.exact, self.recall, self.overlap
        for layer, letter in enumerate(self.letters):
            table.add_row(str(layer), letter, self._attended(layer), *(_share(column[layer]) for column in columns))
        table.add_section()
        table.add_row("mean", "", "", *(_share(_mean(column)) for column in columns))
        return table

    def _attended(self, layer: int) -> str:
        source = self.sources[layer]
        own = "its own" if self.letters[layer] == "F" else "its own, a token late"
        return "everything" if source is None else own if source == layer else f"layer {source}"


def plan_figures(
    replanned: Replanned,
    plan: Plan,
    rows: Sequence[Tensor],
    advance: Callable[[], None],
    expected: Sequence[Tensor] | None = None,
) -> tuple[PlanFigures, list[Tensor]]:
    """Figures of a model under a plan, and for each row the likeliest next tokens past K.

    Args:
        rows: int64[T] each, longer than K + 1. advance: called behind each.
        expected: likeliest tokens of the dense model; None: of this one.
    """
    index_topk = replanned.model.dsa.index_topk
    loss, figures = 0.0, torch.zeros(len(plan.sources), 4, dtype=torch.float64)
    likeliest = []
    for ids in rows:
        logits, part = replanned.measured(ids, plan)
        loss += loss_past_k(logits, ids, index_topk)[0]
        likeliest.append(logits[index_topk:-1].argmax(-1).cpu())
        figures += part.cpu()
        advance()
    past = sum(len(ids) - index_topk for ids in rows)
    agreed = torch.cat(likeliest) == torch.cat([*(expected or likeliest)])
    mass, exact, recall, overlap = (figures / past).T.tolist()
    found = PlanFigures(
        letters=plan.letters,
        sources=plan.sources,
        loss=loss / (past - len(rows)),
        agreement=agreed.double().mean().item(),
        mass=tuple(mass),
        exact=tuple(None if math.isnan(share) else share for share in exact),
        recall=tuple(recall),
        overlap=tuple(None if math.isnan(share) else share for share in overlap),
    )
    return found, likeliest


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
