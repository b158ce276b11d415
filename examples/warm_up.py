"""Train the indexers of the demo model: this made `tinyseek-4m/indexer.safetensors`, on a CPU.

The texts are files of the standard library in which codes are planted and, further on, asked for; those that `demo.py`
reads are not among them. A run that is killed goes on from its last checkpoint, in `warm_up_state`.
"""

import argparse
import random
import sysconfig
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.utils import logging

import dsa_compile
from dsa_compile.export import save_indexers
from dsa_compile.needles import MODULES
from dsa_compile.texts import encode

CHECKPOINT = Path(__file__).parent / "tinyseek-4m"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=CHECKPOINT, help="checkpoint folder that gets the indexers")
parser.add_argument("--steps", type=int, default=160)
parser.add_argument("--tokens", type=int, default=3072, help="of every eighth row; the others have a third of that")
options = parser.parse_args()
logging.set_verbosity_error()  # the checkpoint's MTP layer is not loaded; transformers would list its tensors

rng = random.Random(0)
library = Path(sysconfig.get_paths()["stdlib"])
sources = sorted(f for f in library.glob("*.py") if f.stem not in MODULES and f.stat().st_size > 20_000)


def text_with_codes(characters: int) -> str:
    """A piece of a source file, in which every few lines a code is told or one that was told is asked for."""
    source = rng.choice(sources).read_text(encoding="utf-8")
    start = rng.randrange(max(1, len(source) - characters))
    told, parts = [], []
    for place in range(start, start + characters, 160):
        parts.append(source[place : place + 160])
        if not told or rng.random() < 0.3:
            name = "".join(rng.choice("bcdfghjklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3))))
            told.append(f"code of {name} is {rng.randrange(10_000):04}.")
            parts.append(f"\nThe {told[-1]}\n")
        elif rng.random() < 0.5:
            parts.append(f"\nRecall: the {rng.choice(told)}\n")
    return "".join(parts)


tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
lengths = [options.tokens // (1 if row % 8 == 7 else 3) for row in range(options.steps)]
rows = [{"input_ids": encode(tokenizer, text_with_codes(3 * length))[:length]} for length in lengths]
arguments = TrainingArguments(
    "warm_up_state",
    max_steps=options.steps,
    per_device_train_batch_size=1,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=options.steps // 20,
    adam_beta2=0.98,
    logging_steps=10,
    save_steps=max(1, options.steps // 40),
    save_total_limit=2,
    use_cpu=True,
    report_to=[],
)
sizes = {"index_topk": 128, "index_n_heads": 4, "index_head_dim": 64}
found = dsa_compile.warmup(model, rows, arguments, indexer="random", mtp={}, **sizes)
small = {name: tensor.bfloat16() for name, tensor in found.indexers.items()}  # as the rest of the checkpoint
save_indexers(replace(found, indexers=small), options.out)
print("divergences:", *(f"{nats:.3f}" for nats in found.divergences))
