"""How many graphs a session compiles, what they hold, and how much memory a long prefill takes."""

import subprocess
import sys

import pytest
import torch
from cases import FAMILIES, each_unlike, optimized, token_ids
from torch._dynamo.utils import counters

from dsa_compile.passes.base import is_dsa_op


@each_unlike(FAMILIES)
def test_five_prompt_lengths_and_200_steps_take_at_most_four_graphs(case, device):
    model = optimized(case, device)
    counters.clear()
    for length in (5, 9, 23, 48, 64):
        cache = model.make_cache(2, 256)
        model.generate(
            token_ids(2, length, device), past_key_values=cache, max_new_tokens=5, do_sample=False, eos_token_id=-1
        )
    first = counters["stats"]["unique_graphs"]
    assert 1 <= first <= 4
    cache = model.make_cache(2, 256)
    model.generate(
        token_ids(2, 30, device), past_key_values=cache, max_new_tokens=200, do_sample=False, eos_token_id=-1
    )
    assert counters["stats"]["unique_graphs"] == first
    assert not counters["graph_break"]


@pytest.mark.parametrize("cached", [False, True])
@each_unlike(FAMILIES)
def test_no_tensor_spans_queries_and_keys(case, cached, device, graphs):
    """T and S are primes that no model dimension equals, so a tensor with both is a mask or scores."""
    model = optimized(case, device)
    T, S = 37, 101
    ids = token_ids(2, T, device)
    with torch.no_grad():
        if cached:
            model(ids, past_key_values=model.make_cache(2, S))
        else:
            model(ids, use_cache=False)
    (gm,) = graphs
    assert any(is_dsa_op(n) for n in gm.graph.nodes)
    length = next(
        n.meta["example_value"].shape[1] for n in gm.graph.nodes if n.op == "placeholder" and "input_ids" in n.name
    )
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            queries = sum(size is length or str(size) == str(length) for size in value.shape)
            assert not (S in value.shape and queries), node
            assert queries < 2, node


MEMORY = """
import resource, sys
import torch, transformers
import dsa_compile
torch.manual_seed(0)
selector = sys.argv[2]
fields = {"selector": selector}
if selector == "indexer":
    fields = {"indexer": "random", "index_n_heads": 4, "index_head_dim": 64}
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
dsa_compile.optimize(model, lowering="eager", index_topk=128, **fields)
cache = model.make_cache(1, 16384)
with torch.no_grad():
    model(torch.randint(3, 4096, (1, 64)), logits_to_keep=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model(torch.randint(3, 4096, (1, 16384)), past_key_values=cache, logits_to_keep=1)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["indexer", "attention", "dense"])
def test_a_prefill_of_16384_tokens_adds_less_than_1_5_gb(selector, pytestconfig):
    checkpoint = pytestconfig.rootpath / "examples" / "tinyseek-4m"
    added = subprocess.run(
        [sys.executable, "-c", MEMORY, str(checkpoint), selector], capture_output=True, text=True, check=True
    )
    assert int(added.stdout) < 1.5e9
