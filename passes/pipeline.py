"""The passes in their order, and the runner. This list is the truth about the order."""

import logging
from collections import Counter
from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule

from dsa_compile.config import DSAConfig, nearest
from dsa_compile.errors import ConfigError
from dsa_compile.passes.absorb_mla import AbsorbMLA
from dsa_compile.passes.base import Context, GraphPass
from dsa_compile.passes.choose_form import ChooseForm
from dsa_compile.passes.fuse_routing import FuseRouting
from dsa_compile.passes.insert_indexer import InsertIndexer
from dsa_compile.passes.outer_products import OuterProducts
from dsa_compile.passes.overlap_indexer import OverlapIndexer
from dsa_compile.passes.plan_selection import PlanSelection
from dsa_compile.passes.raise_indexer import RaiseIndexer
from dsa_compile.passes.raise_mla import RaiseMLA
from dsa_compile.passes.row_products import RowProducts
from dsa_compile.passes.sparsify import Sparsify
from dsa_compile.report import Report, log

PIPELINE: tuple[GraphPass, ...] = (
    RaiseMLA(),
    RaiseIndexer(),
    InsertIndexer(),
    PlanSelection(),
    Sparsify(),
    AbsorbMLA(),
    ChooseForm(),
    OverlapIndexer(),
    OuterProducts(),
    FuseRouting(),
    RowProducts(),
)


def rewrite(gm: GraphModule, config: DSAConfig) -> Report:
    """Run every pass that ``config.disable_passes`` does not name over a Dynamo graph, in place.

    Raises:
        ConfigError: ``disable_passes`` names no pass.
    """
    check_names(config.disable_passes)
    report = Report()
    context = Context(config, report)
    for number, graph_pass in enumerate(PIPELINE):
        if graph_pass.name in config.disable_passes:
            report.notes.append(f"{graph_pass.name}: disabled")
            continue
        before = op_counts(gm)
        _dump(gm, f"{number:02d} {graph_pass.name} before")
        graph_pass(gm, context)
        report.op_counts[graph_pass.name] = before, op_counts(gm)
        _dump(gm, f"{number:02d} {graph_pass.name} after", report.op_changes(graph_pass.name))
    return report


def op_counts(gm: GraphModule) -> Counter[str]:
    """How often each operator occurs in a graph: ``dsa.mla.default``; functions and methods by their plain name."""
    return Counter(_op_name(n.target) for n in gm.graph.nodes if n.op in ("call_function", "call_method"))


def _op_name(target: Any) -> str:
    return str(target) if isinstance(target, (str, OpOverload)) else target.__name__


def check_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError for the first of ``names`` that is no pass, naming the nearest."""
    known = [p.name for p in PIPELINE]
    for name in names:
        if name not in known:
            raise ConfigError(f"disable_passes: unknown pass {name!r}; {nearest(name, known, 'passes')}")


def _dump(gm: GraphModule, title: str, changes: dict[str, int] | None = None) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    lines = [f"{op}: {delta:+d}" for op, delta in (changes or {}).items()]
    counts = "" if changes is None else "\n" + ("\n".join(lines) or "no change")
    log.debug("%s%s\n%s", title, counts, gm.print_readable(print_output=False))
