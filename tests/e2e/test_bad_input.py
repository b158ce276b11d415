"""What cannot be served is refused by name, and leaves model and cache as they were."""

import copy
import json

import pytest
import torch
from cases import TOPK, left_padded, optimized, stock, token_ids
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import dsa_compile
from dsa_compile.errors import (
    CacheCapacityError,
    CacheError,
    CheckpointError,
    ConfigError,
    IndexerWeightsError,
    InputError,
    UnsupportedModelError,
)
from dsa_compile.models.miniature import miniature


@pytest.fixture
def model(device):
    return optimized("deepseek_v3", device)


@pytest.fixture
def filled(model, device):
    """A cache that holds 10 tokens of two sequences."""
    cache = model.make_cache(2, 16)
    with torch.no_grad():
        model(token_ids(2, 10, device), past_key_values=cache)
    return cache


def snapshot(cache):
    pools = [pool.clone() for layer in cache.layers for pool in layer.pools().values()]
    return pools, cache.lengths.valid.clone(), cache.lengths.seen.clone()


def assert_unchanged(cache, before):
    torch.testing.assert_close(snapshot(cache), before, atol=0, rtol=0)
    assert cache.lengths.slots is None


CONFIGS = [
    ({"index_top": 8}, ConfigError, "unknown option 'index_top'; did you mean 'index_topk'"),
    ({"index_topk": 0}, ConfigError, "index_topk: expected a whole number of at least 1, came 0"),
    ({"selector": "best"}, ConfigError, "selector: expected one of"),
    ({"mode": "fast"}, ConfigError, "mode: expected one of None, 'default', 'reduce-overhead'"),
    ({"lowering": "cuda"}, ConfigError, "lowering: expected one of 'inductor', 'eager'"),
    ({"indexer": "random", "index_topk": 8193}, ConfigError, "index_topk: expected at most 8192 with an indexer, came"),
    ({"cache": {"index_dtype": "int4"}}, ConfigError, r"CacheConfig\.index_dtype: expected one of None, 'fp8', came"),
    ({"cache": {"rotate_index": "no"}}, ConfigError, r"CacheConfig\.rotate_index: expected one of False, True, came"),
    (
        {"indexer": "random", "index_head_dim": 24, "cache": {"rotate_index": True}},
        ConfigError,
        r"CacheConfig\.rotate_index: expected an index_head_dim that is a power of two, came 24\. Leave it out",
    ),
    ({"cache": {"dtype": "int4"}}, ConfigError, r"CacheConfig\.dtype: expected one of None, 'fp8', came 'int4'"),
    ({"selector": "dense", "indexer": "random"}, ConfigError, "read by selector='indexer' alone"),
    ({"mode": "max-autotune", "lowering": "eager"}, ConfigError, "needs lowering='inductor'"),
    ({"cache": {"capacty": 4}}, ConfigError, "did you mean 'capacity'"),
    ({"cache": {"capacity": 0}}, ConfigError, "capacity: expected a whole number of at least 1"),
    ({}, IndexerWeightsError, "Three ways on: selector='dense'"),
    ({"indexer": "no/such/file"}, CheckpointError, "found neither"),
    ({"indexer": "random", "index_head_dim": 4}, IndexerWeightsError, "smaller than the 8 dimensions that RoPE turns"),
]


@pytest.mark.parametrize(("fields", "error", "text"), CONFIGS)
def test_options_that_cannot_work(fields, error, text, device):
    model = copy.deepcopy(stock("deepseek_v3", device))
    with pytest.raises(error, match=text):
        dsa_compile.optimize(model, **fields)
    assert_stock(model, device)


def assert_stock(model, device):
    """Nothing of a failed preparation is left."""
    reference = stock("deepseek_v3", device)
    assert type(model) is type(reference)
    assert model.config._attn_implementation == reference.config._attn_implementation
    assert [n for n, _ in model.named_modules()] == [n for n, _ in reference.named_modules()]
    assert {type(m) for m in model.modules()} == {type(m) for m in reference.modules()}
    ids = token_ids(1, 5, device)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)


def spoiled(weights, kind):
    weights = {k: v.clone() for k, v in weights.items() if "indexer" in k}
    name = "model.layers.1.self_attn.indexer.wk.weight"
    if kind == "shape":
        weights[name] = weights[name][:, :-1].contiguous()
    elif kind == "nan":
        weights[name][0, 0] = float("nan")
    elif kind == "tensor":
        del weights[name]
    elif kind == "layer":
        weights = {k: v for k, v in weights.items() if ".1." not in k}
    return weights


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", r"layer 1: .*expected shape \(128, 48\)|layer 1: wk.weight: expected shape"),
        ("nan", "layer 1: wk.weight holds NaN"),
        ("tensor", "layer 1: the indexer lacks wk.weight"),
        ("layer", r"found none for layers \[1\]"),
    ],
)
def test_indexer_weights_that_do_not_fit(kind, text, as_file, tmp_path, device):
    weights = spoiled(stock("deepseek_v32", device).state_dict(), kind)
    if as_file:
        save_file(weights, tmp_path / "indexer.safetensors")
    model = copy.deepcopy(stock("deepseek_v3", device))
    with pytest.raises(IndexerWeightsError, match=text):
        dsa_compile.optimize(model, indexer=tmp_path / "indexer.safetensors" if as_file else weights)
    assert_stock(model, device)


def test_folders_and_files_that_are_no_checkpoints(tmp_path, device):
    model = copy.deepcopy(stock("deepseek_v3", device))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"with config\.json"):
        dsa_compile.optimize(model, indexer=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="holds no indexer tensors"):
        dsa_compile.optimize(model, indexer=tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"broken.safetensors: cannot be read"):
        dsa_compile.optimize(model, indexer=tmp_path)
    assert_stock(model, device)


def test_a_model_without_mla_is_named():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*Looked for.*deepseek_v3.*kv_b_proj"):
        dsa_compile.optimize(LlamaForCausalLM(config))


def test_quantised_weights_and_a_second_preparation_are_refused(model, device):
    quantised = copy.deepcopy(stock("deepseek_v3", device))
    attention = quantised.model.layers[1].self_attn
    attention.kv_b_proj.weight = torch.nn.Parameter(attention.kv_b_proj.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"layer 1: kv_b_proj.weight: expected a floating-point"):
        dsa_compile.optimize(quantised, selector="dense")
    with pytest.raises(ConfigError, match="is prepared already"):
        dsa_compile.optimize(model, selector="dense")


def bad_calls(model, device):
    ids = token_ids(2, 3, device)
    four_d = torch.ones(2, 1, 3, 13, dtype=torch.bool, device=device)
    late = torch.ones(2, 13, dtype=torch.long, device=device)
    late[0, 2] = 0
    return {
        "4-D mask": ({"attention_mask": four_d}, InputError, "expected a 2-D mask"),
        "short mask": ({"attention_mask": late[:, :5]}, InputError, r"expected \[2, 13\] \(10 tokens in the cache"),
        "changed mask": ({"attention_mask": late}, InputError, "differ from the mask under which"),
        "attentions": ({"output_attentions": True}, InputError, "output_attentions=True"),
        "positions": (
            {"position_ids": torch.arange(4, device=device)[None]},
            InputError,
            r"position_ids: expected \[2",
        ),
        "too long": (
            {"input_ids": token_ids(2, 7, device)},
            CacheCapacityError,
            r"holds 16 tokens.*needs 17.*make_cache",
        ),
        "batch": ({"input_ids": ids[:1]}, CacheError, "holds 2 sequences, the call has 1"),
        "no tokens": ({"input_ids": None}, ValueError, "exactly one of input_ids or inputs_embeds"),
    }


@pytest.mark.parametrize("kind", list(bad_calls(None, torch.device("cpu"))))
def test_calls_that_cannot_be_served_change_nothing(kind, model, filled, device):
    changes, error, text = bad_calls(model, device)[kind]
    before = snapshot(filled)
    with torch.no_grad(), pytest.raises(error, match=text):
        model(**{"input_ids": token_ids(2, 3, device), "past_key_values": filled} | changes)
    assert_unchanged(filled, before)


def test_caches_that_are_not_the_models_own(model, filled, device):
    ids, before = token_ids(2, 3, device), snapshot(filled)
    other = dsa_compile.optimize(miniature("deepseek_v3", seed=1).to(device), lowering="eager", selector="dense")
    with torch.no_grad():
        with pytest.raises(CacheError, match="belongs to another model"):
            other(ids, past_key_values=filled)
        with pytest.raises(CacheError, match="expected a DSACache, came DynamicCache"):
            model(ids, past_key_values=DynamicCache(config=model.config))
        with pytest.raises(CacheError, match=r"is torch.float32 on .*, the model is torch.bfloat16"):
            copy.deepcopy(model).to(torch.bfloat16)(ids, past_key_values=filled)
        with pytest.raises(CacheError, match="written inside a call of a model that"):
            stock("deepseek_v3", device)(ids, past_key_values=filled)
    assert_unchanged(filled, before)


def test_embeddings_of_another_dtype(model, device):
    embeds = torch.zeros(1, 3, model.config.hidden_size, dtype=torch.float16, device=device)
    with torch.no_grad(), pytest.raises(InputError, match=r"inputs_embeds: expected torch\.float32"):
        model(inputs_embeds=embeds)


def test_stock_switches_that_would_be_silently_wrong(model, device):
    with pytest.raises(InputError, match="set_attn_implementation"):
        model.set_attn_implementation("sdpa")
    ids = token_ids(1, 4, device)
    with pytest.raises(InputError, match="cache_implementation='quantized'"):
        model.generate(ids, cache_implementation="quantized", max_new_tokens=2)
    dropping = miniature("deepseek_v3", attention_dropout=0.5).to(device)
    dsa_compile.optimize(dropping, selector="dense", lowering="eager").train()
    with pytest.raises(InputError, match=r"attention_dropout=0.5 in training mode"):
        dropping(ids)


def test_generate_past_the_capacity_says_how_to_ask_for_more(device):
    model = optimized("deepseek_v3", device, cache={"capacity": 12})
    with pytest.raises(CacheCapacityError, match=r"holds 12 tokens.*CacheConfig\(capacity=13\)"):
        model.generate(token_ids(1, 10, device), max_new_tokens=8, do_sample=False, eos_token_id=-1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_call_leaves_the_cache_at_its_old_length(error, model, filled, device):
    ids = token_ids(2, 3, device)
    length = filled.lengths.valid.clone()

    def stop(*args):
        raise error

    with torch.no_grad():
        want = model(ids, past_key_values=copy.deepcopy(filled)).logits
        run = model.dsa_guard._run

        def interrupted(*args):
            run(*args)
            raise error

        model.dsa_guard._run = interrupted
        with pytest.raises(error):
            model(ids, past_key_values=filled)
        model.dsa_guard._run = run
        assert torch.equal(filled.lengths.valid, length)
        assert filled.get_seq_length() == 10
        assert torch.equal(model(ids, past_key_values=filled).logits, want)


def test_padding_does_not_count_against_the_capacity(model, device):
    cache = model.make_cache(3, 2 * TOPK)
    inputs = left_padded(3, 2 * TOPK, device)
    with torch.no_grad():
        model(
            token_ids(3, 2 * TOPK, device)[1:],
            past_key_values=(small := model.make_cache(2, 2 * TOPK - 3)),
            **{k: v[1:] for k, v in inputs.items()},
        )
        model(token_ids(3, 2 * TOPK, device), past_key_values=cache, **inputs)
    assert small.lengths.valid.tolist() == [2 * TOPK - 3, 2 * TOPK - 6]
