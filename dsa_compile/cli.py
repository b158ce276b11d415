"""The console script ``dsa-compile``."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    help="Sparse attention for DeepSeek-family models of Hugging Face.", no_args_is_help=True, add_completion=False
)
bench_app = typer.Typer(help="Benchmarks.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
plan_app = typer.Typer(
    help="Plans: whose selection each layer attends to, what costs what, what fits.", no_args_is_help=True
)
app.add_typer(plan_app, name="plan")

Checkpoint = Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")]
Selector = Annotated[str | None, typer.Option(help="indexer, attention or dense; default: what the checkpoint has.")]
Topk = Annotated[int | None, typer.Option("--index-topk", help="Tokens that a query attends to.")]
PlanName = Annotated[
    str | None, typer.Option("--plan", help="Whose selection layers attend to: mli, share:1/4, mli+share:1/2, ...")
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

COSTED_CONTEXTS = [4096, 32768, 131072]
COSTED_BATCHES = [16, 64]
WEIGHT_BYTES = {"bfloat16": 2, "fp8": 1}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print what a user can mend in one line and exit with 2."""
    from dsa_compile.errors import DSAError

    try:
        yield
    except DSAError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None


def load(checkpoint: Path, dtype: str, device: str) -> Any:
    """The causal language model in a checkpoint folder.

    Raises:
        CheckpointError: the folder is none. ConfigError: dtype or device is unknown.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from dsa_compile.errors import ConfigError

    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype: expected float32, bfloat16 or float16, came {dtype!r}.")
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device: cannot use {device!r} ({str(error).splitlines()[0]}).") from error
    with reading(checkpoint, "config.json"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype), local_files_only=True
        )
    return model.to(place)


def load_weightless(checkpoint: Path) -> Any:
    """The model that a checkpoint folder's config describes, in bfloat16 on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with reading(checkpoint, "config.json"):
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@contextmanager
def reading(checkpoint: Path, file: str) -> Iterator[None]:
    """Turn what transformers raises about a checkpoint folder, which must hold ``file``, into CheckpointError."""
    from transformers.utils import logging

    from dsa_compile.errors import CheckpointError

    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: expected a checkpoint folder, found none.")
    if not (checkpoint / file).is_file():
        raise CheckpointError(f"{checkpoint}: expected a checkpoint folder with {file}; it has none.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint}: cannot be loaded ({str(error).splitlines()[0]}).") from error


@app.command()
def explain(
    checkpoint: Checkpoint,
    selector: Selector = None,
    index_topk: Topk = None,
    indexer: Indexer = None,
    plan: PlanName = None,
    context: Annotated[int, typer.Option(help="Cached tokens that costs are shown for.", min=1)] = 32768,
) -> None:
    """Show what the passes would do to a model, layer by layer, and what that costs."""
    with one_line_errors():
        import dsa_compile

        model = load_weightless(checkpoint)
        options = dsa_compile.DSAConfig.of(selector=selector, index_topk=index_topk, indexer=indexer, plan=plan)
        Console(width=None if sys.stdout.isatty() else 140).print(
            dsa_compile.explain(model, config=options, context=context)
        )


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    selector: Selector = None,
    index_topk: Topk = None,
    indexer: Indexer = None,
    plan: PlanName = None,
    evaluation: Evaluation = None,
    dtype: DType = "float32",
    device: Device = "cpu",
    lowering: Annotated[str, typer.Option(help="inductor, or eager to skip its compilation.")] = "inductor",
    drafts: Annotated[int, typer.Option(help="Tokens to draft in a step with the checkpoint's MTP layer.", min=0)] = 0,
    stock: Annotated[bool, typer.Option("--stock", help="Run transformers' own model, for comparison.")] = False,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
) -> None:
    """Generate from a prompt, and print speed and memory."""
    with one_line_errors():
        text = _prompt(prompt, prompt_file)
        import torch

        import dsa_compile
        from dsa_compile.measure import peak_memory, timed_generate

        options = dsa_compile.DSAConfig.of(
            selector=selector,
            index_topk=index_topk,
            indexer=indexer,
            plan=plan,
            evaluation=evaluation,
            lowering=lowering,
            mtp={"drafts": drafts} if drafts else None,
        )
        model = load(checkpoint, dtype, device)
        tokenizer = _tokenizer(checkpoint)
        if not stock:
            dsa_compile.optimize(model, options)
        ids = _encode(tokenizer, text).to(model.device)
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        run = timed_generate(model, ids, max_new_tokens, progress=True, **sampling)
    console = Console(soft_wrap=True)
    console.print(tokenizer.decode(run.new_tokens[0], skip_special_tokens=True), markup=False)
    drafted = "" if run.accept_length is None else f"{run.accept_length:.2f} tokens a step; "
    console.print(
        f"prompt {ids.shape[1]} tokens, {run.prefill_rate:,.1f} tokens/s with compilation; "
        f"{run.new_tokens.shape[1]} new, {run.decode_rate:,.1f} tokens/s after the first decode step; {drafted}"
        f"cache {run.cache_bytes / 2**20:,.2f} MiB; peak memory {peak_memory(model.device) / 2**20:,.0f} MiB",
        style="dim",
    )


@plan_app.command()
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
            tokenizer=_tokenizer(checkpoint),
            state=_folder(out) / "state.json",
            progress=True,
            selector=selector,
            index_topk=index_topk,
            indexer=indexer,
        )
        found.save(out / "plan.json")
        draw(found, out / "curve.png")
    Console().print(found)
    Console(soft_wrap=True).print(f"plan: {found.plan}")


@plan_app.command("cost")
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
        _check_out(png, "--png")
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


@plan_app.command()
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
                load_weightless(model), selector=selector, indexer=indexer, plan=plan, cache=cache
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


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    plan: Annotated[str, typer.Option(help="mli, share:1/4, mli+share:FSFS, ...")],
    texts: Texts,
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
        _check_out(out)
        import dsa_compile
        from dsa_compile.texts import read_texts

        read = read_texts(texts)
        found = dsa_compile.evaluate_plan(
            load(checkpoint, dtype, device),
            read,
            needles=needles,
            tokens=tokens,
            tokenizer=_tokenizer(checkpoint),
            progress=True,
            plan=plan,
            selector=selector,
            index_topk=index_topk,
            indexer=indexer,
        )
        if out is not None:
            found.save(out)
    Console(width=None if sys.stdout.isatty() else 140).print(found)


@app.command()
def convert(
    checkpoint: Checkpoint,
    data: Annotated[
        list[Path], typer.Option(help="A text file, or a folder of them; documents end with <|endoftext|>. Repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the sparse checkpoint; one that is there is replaced.")],
    plan: PlanName = None,
    index_topk: Topk = None,
    indexer: Annotated[Path | None, typer.Option(help="With --retrain: where indexers start.")] = None,
    index_heads: Annotated[int, typer.Option(help="Heads of a new indexer.")] = 64,
    index_head_dim: Annotated[int, typer.Option(help="Dimension of such a head.")] = 128,
    mtp: Annotated[
        bool, typer.Option(help="Train an indexer for the MTP layer too, where the checkpoint has one that drafts.")
    ] = True,
    steps: Annotated[int, typer.Option(help="Of the optimizer.")] = 1000,
    sparse_steps: Annotated[int, typer.Option(help="Of a second stage, under sparse attention.")] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate at its highest.")] = 5e-3,
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
            tokenizer=_tokenizer(checkpoint),
            steps=steps,
            sparse_steps=sparse_steps,
            learning_rate=lr,
            batch=batch,
            tokens=tokens,
            isolate=isolate,
            held_out=held_out,
            seed=seed,
            retrain=retrain,
            progress=True,
            mtp={} if mtp and brings_mtp(model) else None,
            plan=plan,
            index_topk=index_topk,
            indexer=indexer,
            index_n_heads=index_heads,
            index_head_dim=index_head_dim,
        )
    Console().print(made)
    Console(soft_wrap=True).print(f"{out}: {made.model_type}" + (f", to be used with plan {plan}" if plan else ""))


@bench_app.command()
def startup(
    layers: Annotated[int, typer.Option(help="Layers of the DeepSeek-V3.2 miniature.", min=1)] = 61,
    lowering: Annotated[str, typer.Option(help="inductor or eager.")] = "eager",
    out: Out = None,
) -> None:
    """Time from optimize to the first decode step of a deep model."""
    with one_line_errors():
        _check_out(out)
        from dsa_compile.bench.startup import startup as run

        run(layers, lowering, out)


@bench_app.command()
def attention(
    case: Cases = None,
    lowering: Annotated[str, typer.Option(help="inductor or eager.")] = "inductor",
    out: Out = None,
) -> None:
    """Check sparse MLA attention against float64 on a GPU, then time it; exits with 1 if a result is wrong."""
    _bench("attention", out, names=case or None, lowering=lowering)


@bench_app.command()
def indexer(case: Cases = None, out: Out = None) -> None:
    """Check index scores against float64 on a GPU, then time them; exits with 1 if a result is wrong."""
    _bench("indexer", out, names=case or None)


@bench_app.command()
def topk(case: Cases = None, out: Out = None) -> None:
    """Check the top-k of index scores on a GPU, then time it beside torch.topk; exits with 1 if a result is wrong."""
    _bench("topk", out, names=case or None)


@bench_app.command()
def select(case: Cases = None, out: Out = None) -> None:
    """Check the selection of tokens against float64 on a GPU, then time it; exits with 1 if a result is wrong."""
    _bench("select", out, names=case or None)


@bench_app.command("plan")
def bench_plan(
    slice: Annotated[list[str] | None, typer.Option(help="deepseek_v32 or glm_moe_dsa; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; repeat for several.", min=1)] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a sequence; repeat for several.", min=2)] = None,
    plan: Annotated[list[str] | None, typer.Option(help="A selection plan; repeat for several.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the slice.", min=3)] = 32,
    experts: Annotated[bool, typer.Option(help="32 real experts a layer instead of a dense MLP.")] = False,
    out: Out = None,
) -> None:
    """Time decode steps of a slice of a large model under selection plans; exits with 1 if overlap changes a bit."""
    given = {"slices": slice, "batches": batch, "contexts": context, "plans": plan}
    _bench("plan", out, layers=layers, experts=experts, **{name: value for name, value in given.items() if value})


@bench_app.command("mtp")
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
    mode: Annotated[str | None, typer.Option(help="Of torch.compile. Default: reduce-overhead.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the slice. Default: 32.", min=1)] = None,
    experts: Annotated[bool | None, typer.Option(help="32 real experts a layer of the slice, or a dense MLP.")] = None,
    out: Out = None,
) -> None:
    """Time generation by drafts, or the steps of a large model's slice, on a GPU; exits with 1 if tokens differ."""
    shared = {"batches": batch, "contexts": context, "drafts": drafts}
    generating = {"new_tokens": new_tokens, "dtype": dtype, "mode": mode}
    stepping = {"layers": layers, "experts": experts}
    with one_line_errors():
        _check_one_way(checkpoint, slice, stepping if checkpoint else generating)
    name, options = ("mtp", generating) if checkpoint else ("mtp_steps", stepping)
    given = {"checkpoint": checkpoint, "slices": slice} | shared | options
    _bench(name, out, **{name: value for name, value in given.items() if value is not None})


@bench_app.command("model")
def bench_model(
    model: Annotated[list[str] | None, typer.Option(help="deepseek_v32 or glm_moe_dsa; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences of decoding; repeat for several.", min=1)] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of a sequence; repeat for several.", min=3)] = None,
    prompt: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; repeat for several.", min=1)] = None,
    out: Out = None,
) -> None:
    """Time decoding and prompts of a whole model with few layers on a GPU, beside stock transformers."""
    given = {"models": model, "batches": batch, "contexts": context, "prompts": prompt}
    _bench("model", out, **{name: value for name, value in given.items() if value})


@bench_app.command("page")
def bench_page(
    figures: Annotated[Path, typer.Argument(help="What 'bench model --out' wrote.")],
    out: Annotated[Path, typer.Option(help="The Markdown page; its picture goes beside it.")],
) -> None:
    """Make a page and a picture of the figures of 'bench model'; nothing is run."""
    with one_line_errors():
        _check_out(out)
        from dsa_compile.bench.page import page

        page(figures, out)


def _check_one_way(checkpoint: Path | None, slice: list[str] | None, foreign: dict[str, Any]) -> None:
    """Of ``bench mtp``: either generation or steps, and no option of the other."""
    from dsa_compile.errors import ConfigError

    if (checkpoint is None) == (slice is None):
        raise ConfigError("bench mtp: expected either --checkpoint or --slice.")
    if extra := [f"--{name.replace('_', '-')}" for name, value in foreign.items() if value is not None]:
        raise ConfigError(f"bench mtp: {extra[0]} has no meaning with {'--checkpoint' if checkpoint else '--slice'}.")


def _bench(name: str, out: Path | None, **options: Any) -> None:
    with one_line_errors():
        _check_out(out)
        run = getattr(importlib.import_module(f"dsa_compile.bench.{name}"), name)
        figures = run(out=out, **options)
    if figures["wrong"]:
        raise typer.Exit(1)


def _folder(path: Path) -> Path:
    from dsa_compile.errors import ConfigError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: expected a folder, or a place for one, came {path} ({error}).") from error
    return path


def _sizes(checkpoint: Path) -> tuple[Any, int | None]:
    """What the cost model reads of a folder's config, and K where that names one."""
    from transformers import AutoConfig

    from dsa_compile.served import served

    with reading(checkpoint, "config.json"):
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    return served(config), getattr(config, "index_topk", None)


def _check_out(out: Path | None, option: str = "--out") -> None:
    from dsa_compile.errors import ConfigError

    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"{option}: expected a file in a folder that exists, came {out}.")


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    from dsa_compile.errors import ConfigError

    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give exactly one of --prompt and --prompt-file.")
    if prompt is not None:
        return prompt
    try:
        return prompt_file.read_text()  # type: ignore[union-attr]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file: {prompt_file} cannot be read ({error}).") from error


def _tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    with reading(checkpoint, "tokenizer_config.json"):
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


def _encode(tokenizer: Any, text: str) -> Any:
    """Token ids [1, T]."""
    from dsa_compile.errors import ConfigError
    from dsa_compile.texts import encode

    ids = encode(tokenizer, text)
    if not len(ids):
        raise ConfigError("the prompt holds no token.")
    return ids[None]
