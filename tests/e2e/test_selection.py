"""What is selected, and that it is what transformers, or a float64 oracle, would select."""

import copy
import dataclasses

import pytest
import torch
from cases import (
    ATOL,
    LENGTHS,
    NATIVE,
    TOPK,
    assert_rows_equal,
    each_unlike,
    left_padded,
    optimized,
    stock,
    token_ids,
)
from oracles import topk_oracle
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

import dsa_compile
from dsa_compile.models.miniature import miniature

native = pytest.mark.parametrize("case", NATIVE)
dense = each_unlike(["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"])


def selections(model, ids, **inputs):
    """What each indexer of a model that is not compiled picks, as sets per row."""
    picked = []

    def keep(module, args, output):
        picked.append(output)

    handles = [
        m.register_forward_hook(keep) for m in model.modules() if isinstance(m, DeepseekV32Indexer | GlmMoeDsaIndexer)
    ]
    with torch.no_grad():
        model(ids, use_cache=False, **inputs)
    for handle in handles:
        handle.remove()
    return picked


def prepared(case, device):
    return dsa_compile.prepare(copy.deepcopy(stock(case, device)))


@native
@pytest.mark.parametrize("padded", [False, True])
def test_the_selected_sets_are_those_of_transformers(case, padded, device):
    ids = token_ids(3, 5 * TOPK, device)
    inputs = left_padded(3, 5 * TOPK, device) if padded else {}
    valid = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    ours, theirs = selections(prepared(case, device), ids, **inputs), selections(stock(case, device), ids, **inputs)
    assert len(ours) == len(theirs) == (3 if case == "deepseek_v32" else 2)
    for mine, other in zip(ours, theirs):
        for b in range(3):
            pad = int((~valid[b]).sum())
            for t in range(pad, ids.shape[1]):
                want = {int(s) - pad for s in other[b, t] if pad <= s <= t}
                got = [int(s) for s in mine[b, t] if s >= 0]
                assert set(got) == want
                assert got == sorted(got)
                assert len(got) == min(TOPK, t - pad + 1)


@native
def test_the_other_rope_layout_selects_otherwise(case, device):
    ids = token_ids(2, 5 * TOPK, device)
    right, wrong = prepared(case, device), prepared(case, device)
    for module in wrong.modules():
        if isinstance(module, DeepseekV32Indexer | GlmMoeDsaIndexer):
            layout = "half" if module.selection.index_rope == "interleaved" else "interleaved"
            module.selection = dataclasses.replace(module.selection, index_rope=layout)
    assert any(not torch.equal(a, b) for a, b in zip(selections(right, ids), selections(wrong, ids)))


GOLDEN = {
    "deepseek_v32": (1, [-0.05829, 0.18862, -0.63973, 1.63084, 0.3863, 0.38356, 0.13177, 0.37573]),
    "glm_moe_dsa": (2, [0.43849, -0.78327, -1.57344, 1.63279, 1.01987, 0.45008, 0.05202, -1.34882]),
}
"""A layer, and dimensions 0 to 7 of the index key that transformers' own DynamicCache holds there for token 8 at 5."""


@native
def test_golden_index_keys(case, device):
    """Output tests are blind to a layout that queries and keys share; stored values are not."""
    model = optimized(case, device)
    cache = model.make_cache(1, 16)
    layer, golden = GOLDEN[case]
    with torch.no_grad():
        model(torch.arange(3, 12, device=device)[None], past_key_values=cache)
    got = cache.layers[layer].index_keys[0, 5, :8]
    torch.testing.assert_close(got.cpu(), torch.tensor(golden), atol=1e-4, rtol=0)


def test_an_indexer_attached_to_v3_makes_it_v32(device):
    sparse = stock("deepseek_v32", device)
    weights = sparse.state_dict()
    model = miniature("deepseek_v3").to(device)
    model.load_state_dict(weights, strict=False)
    dsa_compile.optimize(model, lowering="eager", indexer=weights, index_topk=TOPK)
    cache = model.make_cache(3, 64)
    ids, inputs = token_ids(3, 5 * TOPK, device), left_padded(3, 5 * TOPK, device)
    with torch.no_grad():
        want = sparse(ids, use_cache=False, **inputs).logits
        assert_rows_equal(model(ids, use_cache=False, **inputs).logits, want, inputs["attention_mask"])
        assert_rows_equal(model(ids, past_key_values=cache, **inputs).logits, want, inputs["attention_mask"])
    greedy = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    mask = inputs["attention_mask"]
    assert torch.equal(
        model.generate(ids, attention_mask=mask, **greedy), sparse.generate(ids, attention_mask=mask, **greedy)
    )


@dense
def test_a_random_indexer_with_room_for_every_token_is_dense(case, device):
    model = optimized(case, device, indexer="random", selector="indexer", index_n_heads=8, index_head_dim=16)
    for length in LENGTHS:
        ids = token_ids(3, length, device)
        with torch.no_grad():
            want = stock(case, device)(ids, use_cache=False).logits
            assert_rows_equal(model(ids, use_cache=False).logits, want)
            assert_rows_equal(model(ids, use_cache=True).logits, want)


@pytest.mark.parametrize(
    ("case", "lowering"),
    [
        ("deepseek_v3", "eager"),
        ("deepseek_v3", "inductor"),
        *(
            pytest.param(case, lowering, marks=pytest.mark.slow)
            for case in ("deepseek_v2", "deepseek_v2_lite", "glm4_moe_lite")
            for lowering in ("eager", "inductor")
        ),
    ],
)
def test_selector_attention_equals_the_float64_oracle(case, lowering, device):
    layers = 3 if lowering == "eager" else 2
    oracle = topk_oracle(stock(case, device, layers), TOPK)
    model = optimized(case, device, lowering, layers, selector="attention", index_topk=TOPK)
    for length in LENGTHS[1:] if lowering == "inductor" else LENGTHS:
        ids, inputs = token_ids(3, length, device), left_padded(3, length, device)
        mask = inputs["attention_mask"]
        with torch.no_grad():
            want = oracle(ids, use_cache=False, **inputs).logits
            assert_rows_equal(model(ids, use_cache=True, **inputs).logits, want, mask)
            if lowering == "eager":
                assert_rows_equal(model(ids, use_cache=False, **inputs).logits, want, mask)
    cache = model.make_cache(3, 64)
    with torch.no_grad():
        steps = [model(x, past_key_values=cache).logits for x in ids.split([5 * TOPK - 3, 1, 1, 1], dim=1)]
        assert_rows_equal(torch.cat(steps, 1), oracle(ids, use_cache=False).logits)


@native
def test_selector_dense_on_a_model_with_indexers_ignores_them(case, device):
    model = optimized(case, device, selector="dense")
    wide = miniature(stock(case, device).config.model_type, index_topk=512, **_types(case)).to(device)
    ids = token_ids(2, 5 * TOPK, device)
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, use_cache=True).logits, wide(ids, use_cache=False).logits, atol=ATOL, rtol=0
        )
    assert model.make_cache(1, 8).layers[0].index_keys.shape[-1] == 0


def _types(case):
    return {"indexer_types": ["full", "shared", "full"]} if case == "glm_moe_dsa" else {}
