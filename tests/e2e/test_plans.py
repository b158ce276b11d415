"""Models under a plan equal the stock model whose indexers hand out each other's selections."""

import copy
import warnings

import pytest
import torch
from cases import ATOL, TOPK, assert_rows_equal, left_padded, optimized, stock, token_ids
from oracles import rewired

import dsa_compile
from dsa_compile.errors import CacheError, ConfigError
from dsa_compile.passes.base import arguments, is_op

LATENT, KEY = (32 + 8) * 4, 16 * 4
"""Bytes of a token's latent row and index key in a miniature layer."""
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
INSERTED = {"selector": "indexer", "indexer": "random", "index_n_heads": 8, "index_head_dim": 16}


@pytest.fixture(autouse=True)
def _untrained_reuse():
    """Miniatures are not trained at all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plan=")
        yield


@pytest.mark.parametrize(
    ("plan", "letters", "owners"),
    [("mli", "FLS", {0, 1}), ("share:FSF", "FSF", {0, 2}), (["own", "own", "from:0"], "FFS", {0, 1})],
)
def test_equals_the_stock_model_with_its_selections_rewired(plan, letters, owners, device):
    model = optimized("deepseek_v32", device, plan=plan)
    assert model.dsa.plan.letters == letters
    assert model.make_cache().bytes_per_token() == [LATENT + KEY * (i in owners) for i in range(3)]
    ids, inputs = token_ids(3, 3 * TOPK, device), left_padded(3, 3 * TOPK, device)
    mask = inputs["attention_mask"]
    cache = model.make_cache(3, 64)
    with torch.no_grad():
        want = rewired(stock("deepseek_v32", device), model.dsa.plan.sources)(ids, use_cache=False, **inputs).logits
        first = model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache).logits
        last = model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits
    assert_rows_equal(torch.cat([first, last], 1), want, mask)
    plain = stock("deepseek_v32", device)(ids, use_cache=False, **inputs).logits
    assert (plain - want)[mask.bool()].abs().max() > 10 * ATOL


@pytest.mark.parametrize(
    ("case", "plan", "layer0", "letters"),
    [
        ("deepseek_v32", "mli", "serial", "FLS"),
        ("deepseek_v32", "mli", "dense", "DLS"),
        ("deepseek_v32", "mli", "previous_step", "LLS"),
        ("glm_moe_dsa", ["own", "dense", "from:0"], "serial", "FDS"),
    ],
)
def test_the_backend_string_and_optimize_mean_the_same(case, plan, layer0, letters, device, graphs):
    ids = token_ids(2, 3 * TOPK, device)
    options = {"plan": plan, "layer0": layer0, "lowering": "eager"}
    compiled = torch.compile(copy.deepcopy(stock(case, device)), backend="dsa", options=options)
    model = optimized(case, device, plan=plan, layer0=layer0)
    assert model.dsa.plan.letters == letters
    with torch.no_grad():
        assert_rows_equal(model(ids, use_cache=False).logits, compiled(ids, use_cache=False).logits)
    assert sum(is_op(n, "select") for n in graphs[0].graph.nodes) == len(model.dsa.plan.owners)
    prompts = [n for n in graphs[0].graph.nodes if is_op(n, "prefill_mla")]
    assert [arguments(n)["topk_indices"] is None for n in prompts] == [letter == "D" for letter in letters]


def test_a_plan_without_any_selection_is_warned_of(device):
    compiled = torch.compile(
        copy.deepcopy(stock("deepseek_v3", device)), backend="dsa", options={"plan": "mli", "lowering": "eager"}
    )
    with torch.no_grad(), pytest.warns(UserWarning, match="has no effect: no layer of the graph has a selection"):
        compiled(token_ids(1, 5, device), use_cache=False)


def test_a_prepared_model_carries_its_plan_into_any_compilation(device, graphs):
    ids = token_ids(2, 3 * TOPK, device)
    ours = optimized("deepseek_v3", device, plan="mli", index_topk=TOPK, **INSERTED)
    prepared = dsa_compile.prepare(copy.deepcopy(stock("deepseek_v3", device)), plan="mli", index_topk=TOPK, **INSERTED)
    prepared.compile(backend="dsa", options={"lowering": "eager"})
    with torch.no_grad():
        assert torch.equal(prepared(ids).logits, ours(ids).logits)
    assert sum(is_op(n, "select") for n in graphs[0].graph.nodes) == 2
    assert ours.make_cache().bytes_per_token() == [LATENT + KEY, LATENT + KEY, LATENT]


@pytest.mark.parametrize("plan", ["share:FSS", "mli+share:FFS"])
def test_with_k_over_every_token_a_plan_is_dense(plan, device):
    ids = token_ids(2, 2 * TOPK, device)
    with torch.no_grad():
        dense = optimized("deepseek_v3", device)(ids).logits
        ours = optimized("deepseek_v3", device, plan=plan, index_topk=64, **INSERTED)(ids).logits
    assert_rows_equal(ours, dense)


def test_no_plan_and_own_are_the_same_graph(device, graphs):
    for plan in (None, "own"):
        torch._dynamo.reset()
        with torch.no_grad():
            optimized("glm_moe_dsa", device, layers=2, plan=plan)(token_ids(2, TOPK + 3, device))
    assert graphs[0].code == graphs[1].code


def test_mli_on_a_model_that_shares_already(device):
    model = optimized("glm_moe_dsa", device, plan="mli")
    assert model.dsa.plan.letters == "FSS"
    assert model.make_cache().bytes_per_token() == [LATENT + KEY, LATENT, LATENT]
    ids = token_ids(2, 3 * TOPK, device)
    with torch.no_grad():
        cache = model.make_cache(2, 64)
        stepped = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([20, 4], 1)], 1)
        assert_rows_equal(stepped, model(ids, use_cache=False).logits)


def test_without_the_pass_each_layer_keeps_its_own(device):
    ids = token_ids(2, 3 * TOPK, device)
    model = optimized("deepseek_v32", device, plan="mli", disable_passes=["plan_selection"])
    with torch.no_grad():
        assert_rows_equal(model(ids).logits, stock("deepseek_v32", device)(ids, use_cache=False).logits)


def test_explain_shows_the_plan(device):
    shown = dsa_compile.explain(stock("deepseek_v32", device), plan="mli", context=4096)
    assert "plan FLS" in str(shown)
    assert [layer.indexer for layer in shown.layers] == ["own", "late", "shared"]
    assert shown.bytes_per_token == 3 * LATENT + 2 * KEY
    first, second, third = (layer.chosen for layer in shown.layers)
    assert first == second
    assert third.flops < first.flops
    prepared = dsa_compile.prepare(copy.deepcopy(stock("deepseek_v3", device)), plan=["dense"] * 3, **INSERTED)
    assert [layer.indexer for layer in dsa_compile.explain(prepared).layers] == ["none"] * 3


def test_a_cache_is_of_one_plan(device):
    model = optimized("deepseek_v32", device, plan="mli")
    cache = model.make_cache(1, 16)
    other = optimized("deepseek_v32", device, plan="share:FFS")
    assert other.dsa.dims == model.dsa.dims
    with torch.no_grad():
        model(token_ids(1, 4, device), past_key_values=cache)
        with pytest.raises(CacheError, match="under another plan"):
            other(token_ids(1, 4, device), past_key_values=cache)


def test_reuse_that_nobody_trained_is_warned_of(device):
    with pytest.warns(UserWarning, match=r"plan='mli' \(FLS\): layers attend to selections"):
        optimized("deepseek_v32", device, plan="mli")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimized("glm_moe_dsa", device)
        optimized("deepseek_v32", device, plan="model")
        optimized("glm_moe_dsa", device, plan="share:FSF")


@pytest.mark.parametrize(
    ("case", "fields", "words"),
    [
        ("deepseek_v32", {"plan": "share:FS"}, "each of 3 layers, came 2"),
        ("glm_moe_dsa", {"plan": "share:FFF"}, r"indexers of layers \[1\], which have none"),
        ("deepseek_v3", {"selector": "dense", "plan": "mli"}, "selector='dense' selects nothing"),
        ("deepseek_v32", {"plan": 3}, "expected a string or a list"),
        ("deepseek_v32", {"layer0": "last"}, "layer0: expected one of"),
        ("deepseek_v32", {"disable_passes": ["plan_selectio"]}, "did you mean 'plan_selection'"),
        ("deepseek_v32", {"index_topk": "8"}, "index_topk: expected a whole number"),
    ],
)
def test_a_plan_that_does_not_fit_leaves_the_model_alone(case, fields, words, device):
    model = copy.deepcopy(stock(case, device))
    before = type(model), {type(m) for m in model.modules()}
    with pytest.raises(ConfigError, match=words):
        dsa_compile.optimize(model, **fields)
    assert (type(model), {type(m) for m in model.modules()}) == before


@pytest.mark.parametrize(
    ("case", "lowering", "steps"),
    [
        ("deepseek_v32", "eager", 6),
        ("deepseek_v3", "eager", 6),
        pytest.param("deepseek_v32", "inductor", 6, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", "eager", 1000, marks=[pytest.mark.slow, on_a_gpu]),
    ],
)
def test_decoding_scores_beside_attention_what_a_later_layer_reads(case, lowering, steps, device, graphs):
    ids, chosen = token_ids(2, 3 * TOPK, device), {"plan": "mli", "index_topk": TOPK}
    if case == "deepseek_v3":
        chosen |= {"selector": "indexer", "indexer": "random", "index_n_heads": 4, "index_head_dim": 16}

    def generated(model):
        greedy = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": -1}
        made = model.generate(ids, **greedy, output_logits=True, return_dict_in_generate=True)
        return made.sequences, torch.stack(made.logits)

    want, logits = generated(optimized(case, device, **chosen, disable_passes=["overlap_indexer"]))
    graphs.clear()
    beside, beside_logits = generated(optimized(case, device, lowering, **chosen))
    assert torch.equal(beside, want)
    assert lowering == "inductor" or torch.equal(beside_logits, logits)
    prefill, decode = graphs
    for gm, started in ((prefill, 0), (decode, 1)):
        assert sum(is_op(n, "select_start") for n in gm.graph.nodes) == started
        assert sum(is_op(n, "select_wait") for n in gm.graph.nodes) == started


def test_plans_without_a_late_layer_start_nothing_early(device, graphs):
    for plan in (None, "own", "share:FSF"):
        model = optimized("deepseek_v32", device, plan=plan)
        model.generate(token_ids(2, 3 * TOPK, device), max_new_tokens=3, do_sample=False, eos_token_id=-1)
    assert not any(is_op(n, "select_start") for gm in graphs for n in gm.graph.nodes)
