"""``dsa-compile bench``."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from dsa_compile.cli.errors import check_out, one_line_errors
from dsa_compile.cli.options import Cases, Out

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)


@app.command()
def startup(
    layers: Annotated[int, typer.Option(help="Layers of the DeepSeek-V3.2 miniature.", min=1)] = 61,
    lowering: Annotated[str, typer.Option(help="inductor or eager.")] = "eager",
    model: Annotated[
        str | None, typer.Option(help="deepseek_v32 or glm_moe_dsa in its own widths, 4 layers of it, instead.")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Over empty compiler caches, then in a second process.")] = False,
    out: Out = None,
) -> None:
    """Time from optimize to the first decode steps of a deep model."""
    with one_line_errors():
        check_out(out)
        from dsa_compile.bench.startup import startup as run

        run(layers, lowering, model=model, fresh=fresh, out=out)


@app.command()
def attention(
    case: Cases = None,
    lowering: Annotated[str, typer.Option(help="inductor or eager.")] = "inductor",
    out: Out = None,
) -> None:
    """Check sparse MLA attention against float64 on a GPU, then time it; exits with 1 if a result is wrong."""
    _bench("attention", out, names=case or None, lowering=lowering)


@app.command()
def indexer(case: Cases = None, out: Out = None) -> None:
    """Check index scores against float64 on a GPU, then time them; exits with 1 if a result is wrong."""
    _bench("indexer", out, names=case or None)


@app.command()
def topk(case: Cases = None, out: Out = None) -> None:
    """Check the top-k of index scores on a GPU, then time it beside torch.topk; exits with 1 if a result is wrong."""
    _bench("topk", out, names=case or None)


@app.command()
def select(case: Cases = None, out: Out = None) -> None:
    """Check the selection of tokens against float64 on a GPU, then time it; exits with 1 if a result is wrong."""
    _bench("select", out, names=case or None)


@app.command()
def warmup(case: Cases = None, out: Out = None) -> None:
    """Check what an indexer learns of a layer against float64 on a GPU, then time it; exits with 1 if it is wrong."""
    _bench("warmup", out, names=case or None)


@app.command("plan")
def bench_plan(
    slice: Annotated[list[str] | None, typer.Option(help="deepseek_v32 or glm_moe_dsa; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; repeat for several.", min=1)] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a sequence; repeat for several.", min=2)] = None,
    plan: Annotated[list[str] | None, typer.Option(help="A selection plan; repeat for several.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the slice.", min=3)] = 32,
    experts: Annotated[bool, typer.Option(help="32 real experts a layer instead of a dense MLP.")] = False,
    mode: Annotated[str | None, typer.Option(help="Of torch.compile. Default: max-autotune-no-cudagraphs.")] = None,
    at_once: Annotated[int, typer.Option(help="Plans that compile side by side.", min=1)] = 1,
    out: Out = None,
) -> None:
    """Time decode steps of a slice of a large model under selection plans; exits with 1 if overlap changes a bit."""
    given = {"slices": slice, "batches": batch, "contexts": context, "plans": plan, "mode": mode}
    given = {name: value for name, value in given.items() if value}
    _bench("plan", out, layers=layers, experts=experts, at_once=at_once, **given)


@app.command("mtp")
def bench_mtp(
    checkpoint: Annotated[
        Path | None, typer.Option(help="Generate with the model and MTP layer in this folder.")
    ] = None,
    slice: Annotated[list[str] | None, typer.Option(help="Time steps of deepseek_v32 or glm_moe_dsa instead.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; repeat for several.", min=1)] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a sequence; repeat for several.", min=2)] = None,
    drafts: Annotated[list[int] | None, typer.Option(help="Drafts a step; repeat for several.", min=0)] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate. Default: 128.", min=8)] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the checkpoint. Default: float32.")] = None,
    mode: Annotated[str | None, typer.Option(help="Of torch.compile. Default: its fastest one.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the slice. Default: 32.", min=1)] = None,
    experts: Annotated[bool | None, typer.Option(help="32 real experts a layer of the slice, or a dense MLP.")] = None,
    at_once: Annotated[int | None, typer.Option(help="Ways to generate that compile side by side.", min=1)] = None,
    out: Out = None,
) -> None:
    """Time generation by drafts, or the steps of a large model's slice, on a GPU; exits with 1 if tokens differ."""
    shared = {"batches": batch, "contexts": context, "drafts": drafts, "mode": mode}
    generating = {"new_tokens": new_tokens, "dtype": dtype, "at_once": at_once}
    stepping = {"layers": layers, "experts": experts}
    with one_line_errors():
        _check_one_way(checkpoint, slice, stepping if checkpoint else generating)
    name, options = ("mtp", generating) if checkpoint else ("mtp_steps", stepping)
    given = {"checkpoint": checkpoint, "slices": slice} | shared | options
    _bench(name, out, **{name: value for name, value in given.items() if value is not None})


@app.command("model")
def bench_model(
    model: Annotated[
        list[str] | None,
        typer.Option(help="deepseek_v32, glm_moe_dsa or, of one rank's heads, either with _rank; repeat for several."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences of decoding; repeat for several.", min=1)] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a sequence; repeat for several.", min=3)] = None,
    prompt: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; repeat for several.", min=1)] = None,
    way: Annotated[list[str] | None, typer.Option(help="dsa_compile, 'transformers, eager' or ..., compiled.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="decode, prefill or 'attention layer'; repeat.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="After so many it ends; again with the same --out it goes on.", min=0)
    ] = None,
    at_once: Annotated[int, typer.Option(help="Jobs of ours that compile side by side.", min=1)] = 1,
    out: Out = None,
) -> None:
    """Time decoding and prompts of a whole model with few layers on a GPU, beside stock transformers."""
    given: dict[str, Any] = {"models": model, "batches": batch, "contexts": context, "prompts": prompt}
    given |= {"ways": way, "kinds": kind}
    given = {name: value for name, value in given.items() if value}
    _bench("model", out, at_once=at_once, seconds=seconds, **given)


@app.command("page")
def bench_page(
    figures: Annotated[Path, typer.Argument(help="What 'bench model --out' wrote.")],
    out: Annotated[Path, typer.Option(help="The Markdown page; its picture goes beside it.")],
) -> None:
    """Make a page and a picture of the figures of 'bench model'; nothing is run."""
    with one_line_errors():
        check_out(out)
        from dsa_compile.bench.page import page

        page(figures, out)


@app.command("book")
def bench_book(
    figures: Annotated[list[Path], typer.Argument(help="What benchmarks of kernels wrote by --out.")],
    page: Annotated[Path, typer.Option(help="The Markdown page whose tables are filled.")],
) -> None:
    """Put figures of kernels into the tables of a lab book; nothing is run."""
    with one_line_errors():
        check_out(page)
        from dsa_compile.bench.book import book

        typer.echo(f"{book(figures, page)} cells of {page}")


def _check_one_way(checkpoint: Path | None, slice: list[str] | None, foreign: dict[str, Any]) -> None:
    """Of ``bench mtp``: either generation or steps, and no option of the other."""
    from dsa_compile.errors import ConfigError

    if (checkpoint is None) == (slice is None):
        raise ConfigError("bench mtp: expected either --checkpoint or --slice.")
    if extra := [f"--{name.replace('_', '-')}" for name, value in foreign.items() if value is not None]:
        raise ConfigError(f"bench mtp: {extra[0]} has no meaning with {'--checkpoint' if checkpoint else '--slice'}.")


def _bench(name: str, out: Path | None, **options: Any) -> None:
    with one_line_errors():
        check_out(out)
        run = getattr(importlib.import_module(f"dsa_compile.bench.{name}"), name)
        figures = run(out=out, **options)
    if figures["wrong"]:
        raise typer.Exit(1)
