"""``torch.compile(model, backend="dsa")`` on models as transformers makes them."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from cases import FAMILIES, LENGTHS, NATIVE, TOPK, assert_rows_equal, each_unlike, left_padded, stock, token_ids
from oracles import topk_oracle
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import dsa_compile.backend
from dsa_compile.errors import ConfigError
from dsa_compile.passes.base import is_linear, is_op

ATTENTION = "mla", "sparse_mla", "prefill_mla"
LATENT = ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"]
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
}


def compiled(model, **options):
    return torch.compile(copy.deepcopy(model), backend="dsa", options={"lowering": "eager"} | options, fullgraph=True)


def count(gm, *ops):
    return sum(is_op(n, *ops) for n in gm.graph.nodes)


def expansions(gm):
    """Linear layers over latents that attention would expand."""
    return sum(is_linear(n) and "kv_b_proj" in str(n.args[1]) for n in gm.graph.nodes)


@pytest.mark.parametrize("case", LATENT)
def test_without_a_cache(case, device, graphs):
    model = stock(case, device)
    fast = compiled(model)
    for length in LENGTHS:
        ids, inputs = token_ids(3, length, device), left_padded(3, length, device)
        with torch.no_grad():
            assert_rows_equal(fast(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
            want = model(ids, use_cache=False, **inputs).logits
            assert_rows_equal(fast(ids, use_cache=False, **inputs).logits, want, inputs["attention_mask"])
            packed = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)])[None].to(device)
            want = model(ids, use_cache=False, position_ids=packed).logits
            assert_rows_equal(fast(ids, use_cache=False, position_ids=packed).logits, want)
    for gm in graphs:
        assert count(gm, *ATTENTION) == 3
        assert expansions(gm) == 0


@pytest.mark.parametrize("kind", CACHES)
@each_unlike(LATENT)
def test_with_the_caches_of_transformers(case, kind, device, graphs):
    model = stock(case, device)
    fast = compiled(model)
    ids, inputs = token_ids(3, 2 * TOPK + 3, device), left_padded(3, 2 * TOPK + 3, device)
    for padded in (False, True):
        ours, theirs = CACHES[kind](model), CACHES[kind](model)
        for end, start in ((12, 0), (13, 12), (14, 13), (19, 14)):
            extra = {}
            if padded:
                extra = {
                    "attention_mask": inputs["attention_mask"][:, :end],
                    "position_ids": inputs["position_ids"][:, start:end],
                }
            with torch.no_grad():
                want = model(ids[:, start:end], past_key_values=theirs, **extra).logits
                got = fast(ids[:, start:end], past_key_values=ours, **extra).logits
            assert_rows_equal(got, want, inputs["attention_mask"][:, start:end] if padded else None)
        torch.testing.assert_close(ours.layers[1].keys, theirs.layers[1].keys, atol=1e-5, rtol=0)
    for gm in graphs:
        assert count(gm, *ATTENTION) == 3
        assert expansions(gm) == 0
    assert any(count(gm, "sparse_mla") for gm in graphs), "a decode step is absorbed"


@each_unlike(LATENT)
def test_selector_attention_equals_the_float64_oracle(case, device, graphs):
    model, oracle = stock(case, device), topk_oracle(stock(case, device), TOPK)
    fast = compiled(model, selector="attention", index_topk=TOPK)
    for length in LENGTHS:
        ids, inputs = token_ids(3, length, device), left_padded(3, length, device)
        with torch.no_grad():
            assert_rows_equal(fast(ids, use_cache=False).logits, oracle(ids, use_cache=False).logits)
            want = oracle(ids, use_cache=False, **inputs).logits
            assert_rows_equal(fast(ids, use_cache=False, **inputs).logits, want, inputs["attention_mask"])
    assert all(count(gm, *ATTENTION) == 3 for gm in graphs)
    assert any(count(gm, "select_attention") == count(gm, *ATTENTION[1:]) == 3 for gm in graphs)


@pytest.mark.parametrize("case", NATIVE)
def test_models_with_indexers_without_a_cache(case, device, graphs):
    model = stock(case, device)
    fast = compiled(model)
    for length in LENGTHS:
        ids, inputs = token_ids(3, length, device), left_padded(3, length, device)
        with torch.no_grad():
            assert_rows_equal(fast(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
            want = model(ids, use_cache=False, **inputs).logits
            assert_rows_equal(fast(ids, use_cache=False, **inputs).logits, want, inputs["attention_mask"])
    long = [gm for gm in graphs if count(gm, "select")]
    assert long
    assert all(count(gm, "select") == (2 if case == "glm_moe_dsa" else 3) for gm in long)
    assert all(count(gm, *ATTENTION[1:]) == 3 for gm in long)
    assert all(expansions(gm) == 0 for gm in graphs)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("case", NATIVE)
def test_models_that_cache_expanded_keys_are_left_as_they_are(case, kind, device):
    model = stock(case, device)
    fast = compiled(model)
    ours, theirs = CACHES[kind](model), CACHES[kind](model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for ids in token_ids(2, 14, device).split([12, 1, 1], dim=1):
            with torch.no_grad():
                want = model(ids, past_key_values=theirs).logits
                assert_rows_equal(fast(ids, past_key_values=ours).logits, want)
    skipped = dsa_compile.recent_reports()[-1].of("raise_mla", matched=False)
    assert len(skipped) == 3
    assert all("caches expanded keys and values" in e.reason for e in skipped)


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v32"])
def test_floats_that_dynamic_made_inputs_are_still_constants(case, device, graphs):
    model = stock(case, device)
    fast = torch.compile(
        copy.deepcopy(model), backend="dsa", options={"lowering": "eager"}, fullgraph=True, dynamic=True
    )
    for length in (2 * TOPK + 3, 3 * TOPK):
        ids = token_ids(2, length, device)
        with torch.no_grad():
            assert_rows_equal(fast(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    (gm,) = graphs
    assert count(gm, *ATTENTION) == 3
    assert count(gm, "select") == (3 if case == "deepseek_v32" else 0)


def test_the_option_index_topk_replaces_a_models_own(device):
    model, ids = stock("deepseek_v32", device), token_ids(2, 3 * TOPK, device)
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        layer.self_attn.indexer.index_topk = TOPK // 2
    with torch.no_grad():
        got = compiled(model, index_topk=TOPK // 2)(ids, use_cache=False).logits
        assert_rows_equal(got, twin(ids, use_cache=False).logits)
        assert (got - model(ids, use_cache=False).logits).abs().max() > 1e-2


@pytest.mark.parametrize("disabled", ["raise_mla", "raise_indexer", "insert_indexer", "sparsify", "absorb_mla"])
@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v32"])
def test_without_any_one_pass_the_meaning_stays(case, disabled, device):
    model, ids = stock(case, device), token_ids(2, 5 * TOPK, device)
    fast = compiled(model, disable_passes=[disabled])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for part in (ids, ids[:, :1]):
            assert_rows_equal(fast(part, use_cache=False).logits, model(part, use_cache=False).logits)


def test_a_model_without_mla_compiles_as_it_would_and_says_why(device):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).to(device).eval()
    ids = token_ids(2, 6, device) % 64
    with torch.no_grad(), pytest.warns(UserWarning, match=r"nothing was rewritten.*kv_b_proj") as caught:
        got = torch.compile(model, backend="dsa")(ids, use_cache=False).logits
    assert_rows_equal(got, model(ids, use_cache=False).logits)
    assert sum("nothing was rewritten" in str(w.message) for w in caught) == 1


def test_eager_attention_is_refused_with_the_way_on(device):
    model = copy.deepcopy(stock("deepseek_v3", device))
    model.set_attn_implementation("eager")
    with torch.no_grad(), pytest.warns(UserWarning, match="use attn_implementation='sdpa'"):
        compiled(model)(token_ids(1, 5, device), use_cache=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"selectr": "attention"}, "unknown option 'selectr'; did you mean 'selector'"),
        ({"index_topk": 0}, "index_topk: expected a whole number of at least 1"),
        ({"disable_passes": ["sparsfy"]}, "unknown pass 'sparsfy'; did you mean 'sparsify'"),
    ],
)
def test_options_that_cannot_work(options, text, device):
    with torch.no_grad(), pytest.raises(Exception, match=text) as caught:
        compiled(stock("deepseek_v3", device), **options)(token_ids(1, 5, device), use_cache=False)
    chain = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(e, ConfigError) for e in chain)


FRESH = """
import sys, torch, transformers
config = transformers.DeepseekV3Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8,
    first_k_dense_replace=1,
)
torch.manual_seed(0)
model = transformers.DeepseekV3ForCausalLM(config).eval()
ids = torch.randint(3, 64, (2, 12))
assert "dsa_compile" not in sys.modules
with torch.no_grad():
    want = model(ids, use_cache=False).logits
    got = torch.compile(model, backend="dsa", options=OPTIONS)(ids, use_cache=False).logits
assert "dsa_compile" in sys.modules
print(float((want - got).abs().max()))
"""


@pytest.mark.parametrize("options", [{}, {"lowering": "eager"}])
def test_a_fresh_process_needs_no_import(options, tmp_path):
    code = FRESH.replace("OPTIONS", repr(options))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2e-4


def test_case_names_are_complete():
    assert {*LATENT, *NATIVE} == {*FAMILIES}
