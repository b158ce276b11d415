"""Ten long prompts with planted codes: does the model still find them when each query reads 128 tokens?

The text is the Python standard library's own source, so that every machine has it. Exits with 1 if the sparse model
finds fewer than nine codes in ten, or two fewer than the dense one.
"""

import argparse
import random
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import dsa_compile
from dsa_compile.measure import Run, timed_generate

CHECKPOINT = Path(__file__).parent / "tinyseek-4m"
MODULES = ("argparse", "ast", "calendar", "cmd", "codecs", "copy", "csv", "difflib", "gzip", "textwrap")
CODES_PER_PROMPT = 4
NEW_TOKENS = 6
TOPK = 128


@dataclass(frozen=True)
class Needle:
    prompt: str
    answer: str


def needle(module: str, tokens: int, count: Callable[[str], int], rng: random.Random) -> Needle:
    """A module's source with codes planted between its lines, cut to about ``tokens``, and a question for one."""
    lines: list[str] = []
    for line in (Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py").read_text().splitlines(keepends=True):
        lines.append(line)
        if len(lines) % 20 == 0 and count("".join(lines)) > tokens:
            break
    names = [
        "".join(rng.choice("bdfgjklmnprtvz") + rng.choice("aeiou") for _ in range(3)) for _ in range(CODES_PER_PROMPT)
    ]
    codes = [str(rng.randrange(1000, 10000)) for _ in names]
    for name, code in zip(names, codes):
        lines.insert(rng.randrange(len(lines)), f"The code of {name} is {code}.\n")
    asked = rng.randrange(CODES_PER_PROMPT)
    return Needle(f"{''.join(lines)}\nRecall: the code of {names[asked]} is", codes[asked])


def answers(run: Run, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(t, skip_special_tokens=True).strip().partition(".")[0] for t in run.new_tokens]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10, choices=range(1, 11), metavar="1-10")
    parser.add_argument("--tokens", type=int, default=3000, help="of a prompt, about")
    parser.add_argument(
        "--lowering", default="eager", choices=["eager", "inductor"], help="inductor: compile C++ first"
    )
    options = parser.parse_args()
    console = Console(width=140)
    logging.set_verbosity_error()  # the checkpoint's MTP layer is not loaded; transformers would list its tensors

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    rng = random.Random(0)
    needles = [
        needle(m, options.tokens, lambda text: len(tokenizer(text).input_ids), rng) for m in MODULES[: options.prompts]
    ]
    batch = tokenizer([tokenizer.bos_token + n.prompt for n in needles], padding=True, return_tensors="pt")
    console.print(
        f"{len(needles)} prompts, {int(batch.attention_mask.sum())} tokens, the longest {batch.input_ids.shape[1]}"
    )

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)

    def generate(model: Any) -> Run:
        return timed_generate(model, batch.input_ids, NEW_TOKENS, attention_mask=batch.attention_mask, do_sample=False)

    stock = load()
    stepped = -(-(batch.input_ids.shape[1] + NEW_TOKENS) // 256) * 256
    shared = {"lowering": options.lowering, "cache": {"capacity": stepped}}
    dense = dsa_compile.optimize(load(), selector="dense", **shared)
    sparse = dsa_compile.optimize(load(), selector="attention", index_topk=TOPK, **shared)
    runs: dict[str, Run] = {}
    for name, model in {"stock transformers": stock, "dense": dense, f"sparse, K = {TOPK}": sparse}.items():
        with console.status(f"{name}: compiling and answering"):
            if model is not stock:
                # prompts of every length share a graph, so that a short one compiles it
                model.generate(batch.input_ids[:, -64:], max_new_tokens=2, do_sample=False)
            runs[name] = generate(model)

    table = Table(title="codes recalled")
    for name in ("asked in", "code", *runs):
        table.add_column(name)
    found = {name: answers(run, tokenizer) for name, run in runs.items()}
    for row, (module, planted) in enumerate(zip(MODULES, needles)):
        marked = [f"[{'green' if a[row] == planted.answer else 'red'}]{a[row]}" for a in found.values()]
        table.add_row(f"{module}.py", planted.answer, *marked)
    right = {name: sum(a == n.answer for a, n in zip(said, needles)) for name, said in found.items()}
    table.add_section()
    table.add_row("right", "", *(f"{n} of {len(needles)}" for n in right.values()))
    console.print(table)

    speed = Table(title=f"float32 on CPU, {torch.get_num_threads()} threads, batch of {len(needles)}")
    for name in ("", "prefill tokens/s", "decode tokens/s", "cache bytes/token", "cache MiB"):
        speed.add_column(name, justify="right" if name else "left")
    for name, run in runs.items():
        per_token = run.cache_bytes // (len(needles) * (batch.input_ids.shape[1] + NEW_TOKENS - 1))
        if name != "stock transformers":
            per_token = sum(dense.make_cache(1, 1).bytes_per_token())
        speed.add_row(
            name,
            f"{run.prefill_rate:,.0f}",
            f"{run.decode_rate:,.1f}",
            f"{per_token:,}",
            f"{run.cache_bytes / 2**20:.1f}",
        )
    console.print(speed)
    console.print(dsa_compile.explain(sparse, context=batch.input_ids.shape[1]))

    _, dense_right, sparse_right = right.values()
    return int(sparse_right < max(0.9 * len(needles), dense_right - 1))


if __name__ == "__main__":
    sys.exit(main())
