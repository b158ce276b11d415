"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")]
Selector = Annotated[str | None, typer.Option(help="indexer, attention or dense; default: what the checkpoint has.")]
Topk = Annotated[int | None, typer.Option("--index-topk", help="Tokens that a query attends to.")]
PlanName = Annotated[
    str | None, typer.Option("--plan", help="Whose selection layers attend to: mli, share:1/4, mli+share:1/2, ...")
]
Layer0 = Annotated[str, typer.Option(help="Under MLI, layer 0's selection: serial, dense or previous_step.")]
Prefill = Annotated[
    str, typer.Option(help="How a prompt attends: auto, masked or sparse to its selection, dense to everything.")
]
Evaluation = Annotated[Path | None, typer.Option(help="What 'eval --out' wrote of this plan: it is not warned of.")]
Texts = Annotated[list[Path], typer.Option(help="A text file, or a folder of them; give it again for another.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens that are read of each text. Default: 4 K.")]
Indexer = Annotated[str | None, typer.Option(help="Safetensors file or folder with indexer weights, or 'random'.")]
DType = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="A case; give it again for another. Default: all.")]
Out = Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Gpu = Annotated[str, typer.Option(help="h100, h800, h20, h200 or b200.")]
