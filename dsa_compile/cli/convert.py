"""``dsa-compile convert``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsa_compile.cli.checkpoints import load, load_tokenizer
from dsa_compile.cli.errors import one_line_errors
from dsa_compile.cli.options import Checkpoint, Device, Layer0, PlanName, Topk


def convert(
    checkpoint: Checkpoint,
    data: Annotated[
        list[Path], typer.Option(help="A text file, or a folder of them; documents end with <|endoftext|>. Repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the sparse checkpoint; one that is there is replaced.")],
    plan: PlanName = None,
    layer0: Layer0 = "serial",
    index_topk: Topk = None,
    indexer: Annotated[
        str | None, typer.Option(help="'random': new ones, whatever there is. Else, with --retrain, where they start.")
    ] = None,
    index_heads: Annotated[int, typer.Option(help="Heads of a new indexer.")] = 64,
    index_head_dim: Annotated[int, typer.Option(help="Dimension of such a head.")] = 128,
    mtp: Annotated[
        bool, typer.Option(help="Train an indexer for the MTP layer too, where the checkpoint has one that drafts.")
    ] = True,
    steps: Annotated[int, typer.Option(help="Of the optimizer.")] = 1000,
    sparse_steps: Annotated[int, typer.Option(help="Of a second stage, under sparse attention.")] = 0,
    train_all: Annotated[bool, typer.Option("--train-all", help="In that stage the model learns too.")] = False,
    lr: Annotated[float, typer.Option(help="Learning rate at its highest.")] = 5e-3,
    sparse_lr: Annotated[
        float | None, typer.Option(help="Of the second stage. Default: a tenth, or 1e-5 with --train-all.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Of the attention that indexers learn; above 1 it is flatter.")
    ] = 1.0,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 4,
    tokens: Annotated[int | None, typer.Option(help="Of a row. Default: 4 K.")] = None,
    isolate: Annotated[bool, typer.Option("--isolate", help="Documents in a row do not see each other.")] = False,
    held_out: Annotated[int, typer.Option(help="Rows that are measured and not trained on.")] = 2,
    seed: Annotated[int, typer.Option(help="Of new indexers and the order of rows.")] = 0,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Go on from indexers that the model or --indexer has.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; of what is written, too.")] = "float32",
    device: Device = "cpu",
) -> None:
    """Train indexers for a dense model and write a sparse checkpoint; an interrupted run goes on where it was."""
    with one_line_errors():
        from dsa_compile.convert import convert as run
        from dsa_compile.models.preparation import brings_mtp
        from dsa_compile.texts import documents_in, read_texts

        documents, model = documents_in(read_texts(data)), load(checkpoint, dtype, device)
        made = run(
            model,
            documents,
            out,
            tokenizer=load_tokenizer(checkpoint),
            steps=steps,
            sparse_steps=sparse_steps,
            train_all=train_all,
            learning_rate=lr,
            sparse_learning_rate=sparse_lr,
            temperature=temperature,
            batch=batch,
            tokens=tokens,
            isolate=isolate,
            held_out=held_out,
            seed=seed,
            retrain=retrain,
            progress=True,
            mtp={} if mtp and brings_mtp(model) else None,
            plan=plan,
            layer0=layer0,
            index_topk=index_topk,
            indexer=indexer,
            index_n_heads=index_heads,
            index_head_dim=index_head_dim,
        )
    Console().print(made)
    used = f", to be used with plan {plan}" if plan else ""
    used += "" if layer0 == "serial" else f" and layer0 {layer0}"
    Console(soft_wrap=True).print(f"{out}: {made.model_type}{used}")
