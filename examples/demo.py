"""Ten long prompts with planted codes: does the model still find them when each query reads 128 tokens?

Exits with 1 if the sparse model finds fewer than nine codes in ten, or two fewer than the dense one.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import dsa_compile
from dsa_compile.measure import timed_generate
from dsa_compile.needles import make_needles

CHECKPOINT = Path(__file__).parent / "tinyseek-4m"
NEW_TOKENS = 6

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--prompts", type=int, default=10, choices=range(1, 11), metavar="1-10")
parser.add_argument("--tokens", type=int, default=3000, help="of a prompt, about")
parser.add_argument("--lowering", default="eager", choices=["eager", "inductor"], help="inductor: compile C++ first")
options = parser.parse_args()
logging.set_verbosity_error()  # the checkpoint's MTP layer is not loaded; transformers would list its tensors
console = Console(width=140)

tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
needles = make_needles(options.prompts, options.tokens, count=lambda text: len(tokenizer(text).input_ids))
batch = tokenizer([tokenizer.bos_token + n.prompt for n in needles], padding=True, return_tensors="pt")
rows, longest = batch.input_ids.shape
console.print(f"{rows} prompts, {int(batch.attention_mask.sum())} tokens, the longest {longest}")

stock, dense, sparse = (AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32) for _ in range(3))
slots = longest + NEW_TOKENS - 1  # the last new token is not fed back
shared = {"lowering": options.lowering, "cache": {"capacity": slots}}
dsa_compile.optimize(dense, selector="dense", **shared)
dsa_compile.optimize(sparse, **shared)  # with the indexers and the K that the checkpoint has

columns = {
    "asked in": [n.file for n in needles] + ["right", "prefill tokens/s", "decode tokens/s", "cache bytes/token"],
    "code": [n.code for n in needles] + [""] * 4,
}
right = []
models = {"stock transformers": stock, "dense": dense, f"sparse, K = {sparse.dsa.index_topk}": sparse}
for name, model in models.items():
    with console.status(f"{name}: compiling and answering"):
        # prompts of every length share a graph, so that a short one compiles it
        model.generate(batch.input_ids[:, -64:], max_new_tokens=2, do_sample=False)
        run = timed_generate(model, batch.input_ids, NEW_TOKENS, attention_mask=batch.attention_mask, do_sample=False)
    texts = tokenizer.batch_decode(run.new_tokens, skip_special_tokens=True)
    answers = [text.strip().partition(".")[0] for text in texts]
    right.append(sum(answer == n.code for answer, n in zip(answers, needles)))
    columns[name] = [
        *answers,
        f"{right[-1]} of {rows}",
        f"{run.prefill_rate:,.0f}",
        f"{run.decode_rate:,.1f}",
        f"{run.cache_bytes // (rows * slots):,}",
    ]

table = Table(*columns, title=f"codes recalled: float32 on CPU, threads: {torch.get_num_threads()}, batch of {rows}")
for cells in zip(*columns.values()):
    table.add_row(*cells)
table.rows[rows - 1].end_section = True
console.print(table, dsa_compile.explain(sparse, context=longest))

_, dense_right, sparse_right = right
sys.exit(int(sparse_right < max(0.9 * rows, dense_right - 1)))
