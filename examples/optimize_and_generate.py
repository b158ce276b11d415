"""Optimize a checkpoint and generate from it: the whole use of this package in a dozen lines."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dsa_compile

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", nargs="?", default=Path(__file__).parent / "tinyseek-4m")
parser.add_argument("--prompt", default="The code of zujezo is 7629.\nRecall: the code of zujezo is")
parser.add_argument("--lowering", default="inductor")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)

# a dense DeepSeek-V3 with indexers beside it: attend to the 128 tokens that they choose
dsa_compile.optimize(model, lowering=options.lowering)

ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(options.prompt).input_ids]])
output = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
print(tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True))
print(f"cache: {sum(output.past_key_values.bytes_per_token()):,} bytes per token")
