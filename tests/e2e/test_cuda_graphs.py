"""``mode="reduce-overhead"``: graphs reach Inductor fit for CUDA graphs, which copy no input that is written."""

import pytest
import torch
import torch.utils._pytree as pytree
from cases import left_padded, optimized, token_ids
from mtp import drafting, prepared

import dsa_compile
from dsa_compile import compat
from dsa_compile.compiled import Compiled
from dsa_compile.models.miniature import miniature
from dsa_compile.models.mtp_step import Place
from dsa_compile.sampling import Sampling

GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
MODE = {"lowering": "inductor", "mode": "reduce-overhead"}


@pytest.fixture
def handed(monkeypatch):
    """Every graph as Inductor gets it, with its settings; it then runs as it is, as do graphs inside an operator."""
    seen = []

    def compile_fx(gm, inputs, patches):
        if "post_grad_custom_post_pass" in patches:  # no program that a graph starts
            seen.append((gm, patches))
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    monkeypatch.setattr(Compiled, "replays", False)  # recordings of our own hold none of Inductor's
    return seen


@pytest.fixture
def overwritten(monkeypatch):
    """Of what would be compiled, each run spoils what the run before returned, as the replay of a CUDA graph may."""
    returned = []

    def compiled(guard, function, name=None, captured=False):
        def run(*args):
            for tensor in returned:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
            output = pytree.tree_map_only(torch.Tensor, torch.clone, function(*args))
            returned[:] = (x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor))
            return output

        return run

    monkeypatch.setattr(Compiled, "function", compiled)


def written(gm):
    """Inputs of a graph that its operators write to."""
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            for value, argument in zip(node.args, node.target._schema.arguments):
                if argument.is_write:
                    yield from (x for x in pytree.tree_leaves(value) if getattr(x, "op", None) == "placeholder")


def replayed(handed):
    """The graphs that are to be CUDA graphs: all but the one of prompts."""
    assert [patches["triton.cudagraphs"] for _, patches in handed] == [False] + [True] * (len(handed) - 1)
    return [gm for gm, _ in handed[1:]]


def assert_fit(handed):
    for gm in replayed(handed):
        pools = set(written(gm))
        assert pools
        for pool in pools:
            assert pool.meta["tensor_dict"]["_dynamo_static_input_type"] == "unguarded", pool


def test_every_graph_of_drafting(device, handed):
    model = drafting("deepseek_v32", device, cache={"index_dtype": "fp8"}, **MODE)
    model.set_experts_implementation("batched_mm")
    model.generate(token_ids(2, 5, device), **GREEDY)
    assert len(handed) == 3
    assert_fit(handed)


@pytest.mark.slow
def test_drafting_between_graphs(device, handed):
    model = drafting("deepseek_v3", device, **MODE)
    model.set_experts_implementation("batched_mm")
    with pytest.warns(UserWarning, match="between them"):
        model.generate(token_ids(1, 5, device), **GREEDY, no_repeat_ngram_size=3)
    assert len(handed) == 4
    assert_fit(handed)


def test_plain_decoding_with_kept_selections(device, handed):
    model = miniature("deepseek_v32", first_k_dense_replace=3).to(device)
    with pytest.warns(UserWarning, match="share"):
        dsa_compile.optimize(model, plan="mli", layer0="previous_step", **MODE)
    model.generate(token_ids(2, 9, device), **GREEDY)
    assert any(layer.kept is not None for layer in model.make_cache(1, 8).layers)
    assert_fit(handed)


def test_all_tensors_of_a_step_are_on_the_device_of_the_model(handed):
    model = drafting("deepseek_v32", torch.device("cpu"), drafts=2, **MODE).to("meta")
    model.set_experts_implementation("batched_mm")
    tokens, cache = torch.zeros(2, 3, dtype=torch.int64, device="meta"), model.make_cache(2, 32)
    place = Place(tokens[:, 0], tokens[:, 0] == 0, tokens[:, 0])
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    with torch.no_grad():
        model.dsa_guard.compiled.graphs(3).step(
            model, cache, tokens, place, sampling, torch.rand(2, 3, device="meta"), tokens.repeat(1, 8), tokens[:, 0]
        )
    ((gm, patches),) = handed
    assert patches["triton.cudagraphs"]
    values = pytree.tree_leaves([node.meta.get("example_value") for node in gm.graph.nodes])
    assert {x.device.type for x in values if isinstance(x, torch.Tensor)} == {"meta"}


def test_an_operator_that_waits_for_the_device_is_left_out_and_named(device, handed):
    model = optimized("deepseek_v3", device, layers=2, **MODE)
    model.set_experts_implementation("grouped_mm")
    cache, ids = model.make_cache(2, 16), token_ids(2, 5, device)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.warns(UserWarning, match=r"'reduce-overhead': a graph runs without.*'batched_mm'"):
            model(ids[:, :1], past_key_values=cache)
    assert [patches["triton.cudagraphs"] for _, patches in handed] == [False, False]


@pytest.mark.parametrize("change", ["batch_select_indices", "batch_repeat_interleave", "offload"])
def test_pools_that_took_the_place_of_others(device, change):
    model = dsa_compile.prepare(miniature("deepseek_v32").to(device))
    cache = model.make_cache(2, 16)
    arguments = {"batch_select_indices": [torch.tensor([1])], "batch_repeat_interleave": [2], "offload": []}[change]
    target = cache.layers[0] if change == "offload" else cache
    getattr(target, change)(*arguments)
    for pool in cache.layers[0].pools().values():
        assert pool._dynamo_static_input_type == "unguarded"


@pytest.mark.parametrize(
    "sampling",
    [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}],
    ids=["plain", "history", "between graphs"],
)
@pytest.mark.filterwarnings("ignore:generate drafts in two graphs")
def test_nothing_is_read_that_a_later_run_overwrites(device, overwritten, sampling):
    inputs = {"input_ids": token_ids(3, 9, device)} | left_padded(3, 9, device)
    want = prepared("deepseek_v32", device).generate(**inputs, **GREEDY, **sampling)
    model = drafting("deepseek_v32", device, drafts=2)
    model.compile()
    output = model.generate(**inputs, **GREEDY, **sampling, return_dict_in_generate=True)
    assert torch.equal(output.sequences, want)
    cache = output.past_key_values
    assert cache.lengths.state.isfinite().all()
    assert all(pool.isfinite().all() for pool in cache.layers[-1].pools().values())
