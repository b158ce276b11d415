"""``dsa-compile eval``."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsa_compile.cli.checkpoints import load, load_tokenizer
from dsa_compile.cli.errors import check_out, make_folder, one_line_errors
from dsa_compile.cli.options import (
    Checkpoint,
    Device,
    DType,
    Indexer,
    Layer0,
    Out,
    PlanName,
    Prefill,
    Selector,
    Texts,
    Tokens,
    Topk,
)


def evaluate(
    checkpoint: Checkpoint,
    texts: Texts,
    plan: PlanName = None,
    layer0: Layer0 = "serial",
    prefill: Prefill = "auto",
    needles: Annotated[
        int, typer.Option(help="Questions for planted codes, of each kind at each length and depth.", min=0)
    ] = 1,
    kind: Annotated[list[str] | None, typer.Option(help="single, multi-key or multi-value. Default: all.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of such a prompt; give it again for another. Default: --tokens.")
    ] = None,
    depth: Annotated[
        list[float] | None, typer.Option(help="Where the code lies, from 0 to 1. Default: 0.1, 0.3, ... 0.9.")
    ] = None,
    tokens: Tokens = None,
    selector: Selector = None,
    index_topk: Topk = None,
    indexer: Indexer = None,
    dtype: DType = "float32",
    device: Device = "cpu",
    out: Out = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for mass.png and needles.png.")] = None,
) -> None:
    """Measure sparse attention beside dense: loss, attention kept, codes recalled; and a plan beside both."""
    with one_line_errors():
        check_out(out)
        import dsa_compile
        from dsa_compile.curve import check_matplotlib
        from dsa_compile.evaluation_pictures import MASS, draw
        from dsa_compile.haystack import NeedleSuite
        from dsa_compile.texts import read_texts

        if pictures is not None:
            check_matplotlib(MASS)
            make_folder(pictures, "--pictures")
        suite = None
        if needles:
            suite = NeedleSuite(
                kinds=kind or NeedleSuite.kinds,
                lengths=length or NeedleSuite.lengths,
                depths=depth or NeedleSuite.depths,
                repeats=needles,
            )
        found = dsa_compile.evaluate(
            load(checkpoint, dtype, device),
            read_texts(texts),
            needles=suite,
            tokens=tokens,
            tokenizer=load_tokenizer(checkpoint),
            progress=True,
            plan=plan,
            layer0=layer0,
            prefill=prefill,
            selector=selector,
            index_topk=index_topk,
            indexer=indexer,
        )
        if out is not None:
            found.save(out)
        if pictures is not None:
            draw(found, pictures)
    Console(width=None if sys.stdout.isatty() else 140).print(found)
