"""``dsa-compile generate``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dsa_compile.cli.checkpoints import load, load_tokenizer
from dsa_compile.cli.errors import one_line_errors
from dsa_compile.cli.options import (
    Checkpoint,
    Device,
    DType,
    Evaluation,
    Indexer,
    Layer0,
    PlanName,
    Prefill,
    Selector,
    Topk,
)


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    selector: Selector = None,
    index_topk: Topk = None,
    indexer: Indexer = None,
    plan: PlanName = None,
    layer0: Layer0 = "serial",
    prefill: Prefill = "auto",
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
            layer0=layer0,
            prefill=prefill,
            evaluation=evaluation,
            lowering=lowering,
            mtp={"drafts": drafts} if drafts else None,
        )
        model = load(checkpoint, dtype, device)
        tokenizer = load_tokenizer(checkpoint)
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


def _encode(tokenizer: Any, text: str) -> Any:
    """Token ids [1, T]."""
    from dsa_compile.errors import ConfigError
    from dsa_compile.texts import encode

    ids = encode(tokenizer, text)
    if not len(ids):
        raise ConfigError("the prompt holds no token.")
    return ids[None]
