"""``dsa-compile eval``."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from dsa_compile.cli.checkpoints import load, load_tokenizer
from dsa_compile.cli.errors import check_out, one_line_errors
from dsa_compile.cli.options import Checkpoint, Device, DType, Indexer, Layer0, Out, Selector, Texts, Tokens, Topk


def evaluate(
    checkpoint: Checkpoint,
    plan: Annotated[str, typer.Option(help="mli, share:1/4, mli+share:FSFS, ...")],
    texts: Texts,
    layer0: Layer0 = "serial",
    needles: Annotated[int, typer.Option(help="Prompts with planted codes to ask.")] = 10,
    tokens: Tokens = None,
    selector: Selector = None,
    index_topk: Topk = None,
    indexer: Indexer = None,
    dtype: DType = "float32",
    device: Device = "cpu",
    out: Out = None,
) -> None:
    """Measure a plan beside plain sparse and dense attention: loss, recall, attention kept, overlap."""
    with one_line_errors():
        check_out(out)
        import dsa_compile
        from dsa_compile.texts import read_texts

        read = read_texts(texts)
        found = dsa_compile.evaluate_plan(
            load(checkpoint, dtype, device),
            read,
            needles=needles,
            tokens=tokens,
            tokenizer=load_tokenizer(checkpoint),
            progress=True,
            plan=plan,
            layer0=layer0,
            selector=selector,
            index_topk=index_topk,
            indexer=indexer,
        )
        if out is not None:
            found.save(out)
    Console(width=None if sys.stdout.isatty() else 140).print(found)
