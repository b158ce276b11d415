"""Saving, loading, copying and training an optimized model."""

import copy
import pickle

import pytest
import torch
import transformers
from cases import FAMILIES, NATIVE, TOPK, assert_rows_equal, each_unlike, optimized, stock, token_ids
from transformers import AutoModelForCausalLM

import dsa_compile
from dsa_compile.models.miniature import miniature


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, use_cache=True, **inputs).logits


def with_indexer(case, device):
    fields = {} if FAMILIES[case][0] in NATIVE else {"selector": "indexer", "indexer": "random", "index_n_heads": 8}
    return optimized(case, device, index_topk=TOPK, index_head_dim=16, **fields)


@each_unlike(FAMILIES)
def test_pickle_and_deepcopy_stay_optimized(case, device):
    model, ids = with_indexer(case, device), token_ids(2, 5 * TOPK, device)
    want = logits(model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, ids), want)
        assert twin.dsa_guard.model is twin
        assert "choose_form" in {e.pass_name for e in dsa_compile.recent_reports()[-1].entries if e.matched}


@each_unlike(FAMILIES)
def test_save_pretrained_then_optimize_again(case, device, tmp_path):
    model, ids = with_indexer(case, device), token_ids(2, 5 * TOPK, device)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert type(again) is getattr(transformers, type(stock(case, device)).__name__)
    dsa_compile.optimize(again, lowering="eager", index_topk=TOPK)
    assert again.dsa.selector == "indexer"
    torch.testing.assert_close(logits(again, ids), logits(model, ids), atol=1e-6, rtol=0)


def test_a_saved_cache_continues_where_it_stopped(device, tmp_path):
    """In a model that was loaded and optimized anew, too."""
    model, ids = with_indexer("deepseek_v32", device), token_ids(2, 20, device)
    again = with_indexer("deepseek_v32", device)
    cache = model.make_cache(2, 32)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = dsa_compile.DSACache.load(tmp_path / "cache.safetensors", device=device)
        step = token_ids(2, 1, device, seed=3)
        assert torch.equal(again(step, past_key_values=loaded).logits, model(step, past_key_values=cache).logits)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_gradients_are_those_of_the_stock_model(lowering, device):
    reference = copy.deepcopy(stock("deepseek_v3", device, 2))
    model = optimized("deepseek_v3", device, lowering, layers=2)
    ids = token_ids(2, 2 * TOPK, device)
    for each in (reference, model):
        each.set_experts_implementation("batched_mm")  # grouped_mm has no float32 backward that compiles on CUDA
        each(ids, labels=ids, use_cache=False).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_outputs_that_people_ask_for(device):
    reference, model = stock("deepseek_v3", device), optimized("deepseek_v3", device)
    ids = token_ids(2, 9, device)
    with torch.no_grad():
        ours, theirs = (m(ids, output_hidden_states=True, use_cache=False, labels=ids) for m in (model, reference))
        pair = model(ids, return_dict=False, use_cache=False)
    assert len(ours.hidden_states) == len(theirs.hidden_states)
    for mine, other in zip(ours.hidden_states, theirs.hidden_states):
        assert_rows_equal(mine, other)
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert_rows_equal(pair[0], theirs.logits)


def test_a_manual_loop_without_an_explicit_cache(device):
    reference, model = stock("deepseek_v3", device), optimized("deepseek_v3", device)
    ids, past, other = token_ids(2, 9, device), None, None
    with torch.no_grad():
        for step in ids.split([4, 1, 1, 3], dim=1):
            ours = model(step, past_key_values=past)
            theirs = reference(step, past_key_values=other)
            past, other = ours.past_key_values, theirs.past_key_values
            assert_rows_equal(ours.logits, theirs.logits)


@each_unlike(["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_a_prepared_model_gets_its_indexer_from_the_backend_string(case, device):
    family, overrides = FAMILIES[case]
    fields = {"indexer": "random", "index_n_heads": 8, "index_head_dim": 16, "index_topk": TOPK}
    prepared = dsa_compile.prepare(miniature(family, **overrides).to(device), **fields)
    whole = dsa_compile.optimize(miniature(family, **overrides).to(device), lowering="eager", **fields)
    ids = token_ids(2, 5 * TOPK, device)
    outside = torch.compile(prepared, backend="dsa", options={"lowering": "eager"}, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(outside(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)
    prepared.compile(backend="dsa", options={"lowering": "eager"})
    assert torch.equal(logits(prepared, ids), logits(whole, ids))
