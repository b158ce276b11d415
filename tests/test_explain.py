"""`explain` says what `optimize` would do and leaves the model alone."""

import copy

import pytest
import torch
from cases import FAMILIES, NATIVE, TOPK, optimized, stock
from transformers import LlamaConfig, LlamaForCausalLM

import dsa_compile
from dsa_compile.errors import IndexerWeightsError, InputError, UnsupportedModelError


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family(case, device):
    model = stock(case, device)
    fields = (
        {}
        if FAMILIES[case][0] in NATIVE
        else {"indexer": "random", "index_topk": TOPK, "index_n_heads": 8, "index_head_dim": 16}
    )
    classes = {type(m) for m in model.modules()}
    found = dsa_compile.explain(model, context=512, **fields)
    assert [layer.path for layer in found.layers] == [f"model.layers.{i}.self_attn" for i in range(3)]
    for layer in found.layers:
        assert [e.pass_name for e in layer.prefill if e.matched][-1] == "choose_form"
        assert [e.pass_name for e in layer.decode if e.matched][-1] == "sparsify"
        assert layer.chosen.flops < layer.dense.flops
    owners = ["own", "shared", "own"] if case == "glm_moe_dsa" else ["own"] * 3
    assert [layer.indexer for layer in found.layers] == owners
    latent, key = 4 * (32 + 8), 4 * 16
    assert found.bytes_per_token == 3 * latent + key * owners.count("own")
    expanded = 4 * 4 * (16 + 8 + 16)
    if FAMILIES[case][0] in NATIVE:
        assert found.stock_bytes_per_token == 3 * expanded + key * owners.count("own")
    else:
        assert found.stock_bytes_per_token == 3 * latent
    assert {type(m) for m in model.modules()} == classes
    assert "sparsify" in str(found)


def test_a_cache_in_fp8(device):
    model, fp8 = stock("deepseek_v32", device, layers=1), {"dtype": "fp8"}
    full, found = (dsa_compile.explain(model, context=512, **fields) for fields in ({}, {"cache": fp8}))
    row = 32 + 4 + 2 * 8
    assert found.bytes_per_token == row + 4 * 16
    assert found.chosen.flops == full.chosen.flops
    assert full.chosen.bytes - found.chosen.bytes == TOPK * (4 * (32 + 8) - row)
    both = dsa_compile.explain(model, context=512, cache=fp8 | {"index_dtype": "fp8"})
    assert both.bytes_per_token == row + 16 + 4
    assert found.chosen.bytes - both.chosen.bytes == 512 * (4 * 16 - 20)
    again = dsa_compile.explain(optimized("deepseek_v32", device, layers=1, cache=fp8), context=512)
    assert again.layers == found.layers


def test_a_cache_of_at_most_k_slots_stays_dense(device):
    found = dsa_compile.explain(stock("deepseek_v32", device), context=TOPK, inputs={"input_ids": torch.ones(1, TOPK)})
    assert all(
        "no more than K" in e.reason for layer in found.layers for e in layer.decode if e.pass_name == "sparsify"
    )


def test_costs_are_those_of_what_the_passes_made(device):
    model = stock("deepseek_v3", device)
    without = dsa_compile.explain(model, selector="attention", index_topk=TOPK, disable_passes=["insert_indexer"])
    assert without.chosen == without.dense == dsa_compile.explain(model, selector="dense").chosen
    exact = dsa_compile.explain(model, selector="attention", index_topk=TOPK)
    assert exact.chosen.flops > exact.dense.flops
    assert "skipped: no selection: attention stays dense" in str(without)


def test_an_mtp_layer_is_explained_with_the_others(device):
    found = dsa_compile.explain(stock("deepseek_v32", device, 1), mtp={})
    assert [layer.path for layer in found.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert (found.plan, found.layers[1].indexer) == ("F", "own")
    assert found.layers[1].bytes_per_token == found.layers[0].bytes_per_token


def test_no_weight_is_read_or_changed(device):
    model = stock("deepseek_v32", device)
    before = {name: (t.data_ptr(), t._version) for name, t in model.state_dict().items()}
    on_meta = copy.deepcopy(model).to("meta")
    assert str(dsa_compile.explain(on_meta)) == str(dsa_compile.explain(model))
    assert {name: (t.data_ptr(), t._version) for name, t in model.state_dict().items()} == before


def test_an_optimized_model_is_explained_as_it_is(device):
    model = optimized("deepseek_v3", device, selector="attention", index_topk=TOPK)
    found = dsa_compile.explain(model)
    assert (found.selector, found.index_topk) == ("attention", TOPK)
    assert all("sparse_mla" in e.reason for layer in found.layers for e in layer.decode if e.pass_name == "sparsify")
    with pytest.raises(InputError, match="give no options"):
        dsa_compile.explain(model, selector="dense")


def test_refusals_are_those_of_optimize(device):
    with pytest.raises(IndexerWeightsError, match="Three ways on"):
        dsa_compile.explain(stock("deepseek_v3", device))
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        dsa_compile.explain(LlamaForCausalLM(config))
    with pytest.raises(InputError, match="expected inputs with input_ids"):
        dsa_compile.explain(stock("deepseek_v32", device), {"ids": torch.ones(1, 3)})
