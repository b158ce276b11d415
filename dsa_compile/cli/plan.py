"""``dsa-compile plan``."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dsa_compile.cli.checkpoints import load, load_tokenizer, load_weightless, reading
from dsa_compile.cli.errors import check_out, make_folder, one_line_errors
from dsa_compile.cli.options import (
    Checkpoint,
    Device,
    DType,
    Gpu,
    Indexer,
    Layer0,
    PlanName,
    Selector,
    Texts,
    Tokens,
    Topk,
)

app = typer.Typer(
    help="Plans: whose selection each layer attends to, what costs what, what fits.", no_args_is_help=True
)
COSTED_CONTEXTS = [4096, 32768, 131072]
COSTED_BATCHES = [16, 64]
WEIGHT_BYTES = {"bfloat16": 2, "fp8": 1}


@app.command()
def search(
    checkpoint: Checkpoint,
    texts: Texts,
    out: Annotated[Path, typer.Option(help="Folder for plan.json, curve.png and state.json, to go on from.")],
    retention: Annotated[float, typer.Option(help="Share of the layers that still run their indexer.")] = 0.25,
    mli: Annotated[
        bool, typer.Option("--mli/--no-mli", help="Search among plans with the Multi-layer Indexer.")
    ] = True,
    blocks: Annotated[int, typer.Option(help="Runs of layers that are searched at once: as many times faster.")] = 1,
    tokens: Tokens = None,
    selector: Selector = None,
    index_topk: Topk = None,
    indexer: Indexer = None,
    dtype: DType = "float32",
    device: Device = "cpu",
) -> None:
    """Find the layers whose indexers can be dropped at least loss; an interrupted search goes on where it was."""
    with one_line_errors():
        import dsa_compile
        from dsa_compile.curve import check_matplotlib, draw
        from dsa_compile.texts import read_texts

        read = read_texts(texts)
        check_matplotlib()
        found = dsa_compile.search_plan(
            load(checkpoint, dtype, device),
            read,
            retention=retention,
            mli=mli,
            blocks=blocks,
            tokens=tokens,
            tokenizer=load_tokenizer(checkpoint),
            state=make_folder(out) / "state.json",
            progress=True,
            selector=selector,
            index_topk=index_topk,
            indexer=indexer,
        )
        found.save(out / "plan.json")
        draw(found, out / "curve.png")
    Console().print(found)
    Console(soft_wrap=True).print(f"plan: {found.plan}")


@app.command("cost")
def plan_cost(
    model: Annotated[
        Path | None, typer.Option(help="Folder with a config.json. Default: DeepSeek-V3.2's sizes.")
    ] = None,
    gpu: Gpu = "h200",
    context: Annotated[
        list[int], typer.Option(help="Cached tokens; give it again for another.", min=1)
    ] = COSTED_CONTEXTS,
    batch: Annotated[
        list[int], typer.Option(help="Requests on a GPU; give it again for another.", min=1)
    ] = COSTED_BATCHES,
    index_topk: Topk = None,
    local_experts: Annotated[int, typer.Option(help="Experts whose weights a GPU holds of each layer.", min=0)] = 3,
    png: Annotated[Path | None, typer.Option(help="Draw a picture into this PNG file.")] = None,
) -> None:
    """Count what dense and sparse attention cost, and what plans and drafts gain; nothing is run."""
    with one_line_errors():
        check_out(png, "--png")
        from dataclasses import replace

        from dsa_compile.config import DEFAULT_INDEX_TOPK, DSAConfig
        from dsa_compile.cost.speculation import DEEPSEEK_V32
        from dsa_compile.cost_tables import CostTables

        name, sizes, own_topk = "DeepSeek-V3.2", DEEPSEEK_V32, None
        if model is not None:
            name, (sizes, own_topk) = model.resolve().name, _sizes(model)
        tables = CostTables(
            name=name,
            model=replace(sizes, local_experts=local_experts),
            gpu=gpu,
            index_topk=DSAConfig(index_topk=index_topk).index_topk or own_topk or DEFAULT_INDEX_TOPK,
            contexts=context,
            batches=batch,
        )
        if png is not None:
            from dsa_compile.cost_picture import draw

            draw(tables, png)
        Console(width=None if sys.stdout.isatty() else 140).print(tables)


@app.command()
def fits(
    model: Annotated[Path, typer.Option(help="Folder with a config.json.")],
    context: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)],
    batch: Annotated[int, typer.Option(help="Sequences on a GPU.", min=1)] = 1,
    gpu: Gpu = "h200",
    gpus: Annotated[int, typer.Option(help="GPUs that the weights are spread over.", min=1)] = 1,
    weights: Annotated[str, typer.Option(help="bfloat16 or fp8.")] = "bfloat16",
    cache_dtype: Annotated[str | None, typer.Option(help="fp8. Default: bfloat16.")] = None,
    index_dtype: Annotated[str | None, typer.Option(help="fp8. Default: bfloat16.")] = None,
    selector: Selector = None,
    indexer: Indexer = None,
    plan: PlanName = None,
    layer0: Layer0 = "serial",
) -> None:
    """Say whether weights and caches fit on a GPU, and how much does; exits with 1 if they do not."""
    with one_line_errors():
        import warnings

        import dsa_compile
        from dsa_compile.cost.capacity import Capacity
        from dsa_compile.cost.devices import device_named
        from dsa_compile.errors import ConfigError
        from dsa_compile.fit_table import fit_table

        if weights not in WEIGHT_BYTES:
            raise ConfigError(f"--weights: expected {' or '.join(WEIGHT_BYTES)}, came {weights!r}.")
        memory = device_named(gpu).memory
        cache = {"dtype": cache_dtype, "index_dtype": index_dtype}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="plan=")  # a sum loses no quality
            prepared = dsa_compile.prepare(
                load_weightless(model), selector=selector, indexer=indexer, plan=plan, layer0=layer0, cache=cache
            )
        capacity = Capacity(
            memory=memory,
            weights=sum(p.numel() for p in prepared.parameters()) * WEIGHT_BYTES[weights] / gpus,
            token=sum(prepared.make_cache(1, 1).bytes_per_token()),
            workspace=prepared.prompt_bytes(context * batch),
        )
        title = f"{model.resolve().name} on {gpu}" + (f", weights over {gpus} of them" if gpus > 1 else "")
        Console().print(fit_table(title, capacity, context, batch))
    if not capacity.fits(context, batch):
        raise typer.Exit(1)


def _sizes(checkpoint: Path) -> tuple[Any, int | None]:
    """What the cost model reads of a folder's config, and K where that names one."""
    from transformers import AutoConfig

    from dsa_compile.served import served

    with reading(checkpoint, "config.json"):
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    return served(config), getattr(config, "index_topk", None)
