"""``dsa-compile explain``."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from dsa_compile.cli.checkpoints import load_weightless
from dsa_compile.cli.errors import one_line_errors
from dsa_compile.cli.options import Checkpoint, Indexer, Layer0, PlanName, Prefill, Selector, Topk


def explain(
    checkpoint: Checkpoint,
    selector: Selector = None,
    index_topk: Topk = None,
    indexer: Indexer = None,
    plan: PlanName = None,
    layer0: Layer0 = "serial",
    prefill: Prefill = "auto",
    context: Annotated[int, typer.Option(help="Cached tokens that costs are shown for.", min=1)] = 32768,
) -> None:
    """Show what the passes would do to a model, layer by layer, and what that costs."""
    with one_line_errors():
        import dsa_compile

        model = load_weightless(checkpoint)
        options = dsa_compile.DSAConfig.of(
            selector=selector, index_topk=index_topk, indexer=indexer, plan=plan, layer0=layer0, prefill=prefill
        )
        Console(width=None if sys.stdout.isatty() else 140).print(
            dsa_compile.explain(model, config=options, context=context)
        )
