"""Drafting compiled: what its graphs hold, how many there are, and that they give plain tokens."""

import copy
import itertools

import pytest
import torch
from cases import TOPK, left_padded, stock, token_ids, with_positions
from mtp import LAYERS, draft_inputs, drafting, mtp_weights
from torch._dynamo.utils import counters

import dsa_compile
from dsa_compile.pace import Pace
from dsa_compile.passes.pipeline import op_counts

ENDLESS = {"do_sample": False, "eos_token_id": None}
SELECT, ABSORBED = "dsa.select.default", "dsa.sparse_mla.default"


def assert_filled_as_by_a_prompt(model, ids, mask, cache):
    """Every layer's latents and index keys of tokens ``ids`` are what one call for all of them writes."""
    anew, mask = model.make_cache(3, 64), torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    with torch.no_grad():
        model(ids, past_key_values=anew, **with_positions(mask))
    assert torch.equal(cache.lengths.valid, anew.lengths.valid)
    for layer, (one, two) in enumerate(zip(cache.layers, anew.layers)):
        for b, n in enumerate(cache.lengths.valid.tolist()):
            for ours, theirs in zip(one.pools().values(), two.pools().values()):
                rows = slice(n - (layer == LAYERS))
                torch.testing.assert_close(ours[b, rows], theirs[b, rows], atol=1e-4, rtol=0)


def test_a_session_takes_three_graphs_whatever_the_prompts_and_what_is_accepted(device, graphs):
    fields = {"selector": "indexer", "indexer": "random", "index_n_heads": 8, "index_head_dim": 16, "index_topk": TOPK}
    model = drafting("deepseek_v3", device, drafts=2, lowering="eager", share_selection=True, **fields)
    counters.clear()
    batches = [
        {"input_ids": token_ids(3, length, device)} | left_padded(3, length, device) for length in (TOPK + 3, 2 * TOPK)
    ]
    told = ENDLESS | {"max_new_tokens": 6}
    caches = [model.make_cache(3, 64) for _ in batches]
    ours = [model.generate(**inputs, **told, past_key_values=cache) for inputs, cache in zip(batches, caches)]
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]
    fill, draft, step = (op_counts(gm) for gm in graphs)
    assert [ops[SELECT] for ops in (fill, draft, step)] == [LAYERS + 1, 1, LAYERS + 1]
    for gm in graphs:
        writes = gm.graph.find_nodes(op="call_function", target=torch.ops.dsa.cache_write.default)
        assert all(write.args[5] is not None for write in writes), "a draft's index key is written, whoever selects"
    plainly = told | {"return_dict_in_generate": True, "output_logits": True}
    with pytest.warns(UserWarning, match="without drafts: output_logits") as said:
        plain = [model.generate(**inputs, **plainly).sequences for inputs in batches]
    assert all(map(torch.equal, ours, plain))
    assert len(said) == 1
    assert_filled_as_by_a_prompt(model, ours[1][:, :-1], batches[1]["attention_mask"], caches[1])


def test_each_width_is_compiled_once_with_a_static_number_of_rows(device, graphs, monkeypatch):
    widths = itertools.cycle([1, 3])
    monkeypatch.setattr(Pace, "drafts", lambda pace: next(widths))
    counters.clear()
    model = drafting("deepseek_v3", device, drafts="auto", lowering="eager")
    model.generate(token_ids(2, 5, device), **ENDLESS, max_new_tokens=6)
    assert counters["stats"]["unique_graphs"] == 4
    steps = [ops for ops in map(op_counts, graphs) if ops[ABSORBED] > LAYERS]
    assert [ops[ABSORBED] for ops in steps] == [LAYERS + 1, LAYERS + 3]
    unabsorbed = (ops["dsa.mla.default"] + ops["dsa.prefill_mla.default"] for ops in steps)
    assert not any(unabsorbed), "of a dynamic number of rows attention is not absorbed"


def test_drafts_select_for_themselves_by_default(device, graphs):
    model = drafting("glm_moe_dsa", device, drafts=3, lowering="eager")
    with torch.no_grad():
        model.dsa_guard.compiled.graphs(4).draft(
            *draft_inputs(model, model.make_cache(2, 32), token_ids(2, 1, device)[:, 0])
        )
    assert op_counts(graphs[0])[SELECT] == 3


@pytest.mark.parametrize(
    ("config", "option", "shared"), [(True, None, True), (True, False, False), (None, None, False)]
)
def test_a_selection_is_shared_where_the_config_or_else_the_caller_says_so(device, config, option, shared):
    twin = copy.deepcopy(stock("glm_moe_dsa", device, LAYERS))
    if config is not None:
        twin.config.index_share_for_mtp_iteration = config
    mtp = {"module": mtp_weights("glm_moe_dsa", device), "share_selection": option}
    assert dsa_compile.prepare(twin, mtp=mtp).dsa.share_drafts is shared
