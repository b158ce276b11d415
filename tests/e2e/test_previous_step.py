"""Under layer0="previous_step" the first layer attends to what it selected for the token before, and to the token."""

import copy
import warnings

import pytest
import torch
from cases import TOPK, assert_rows_equal, left_padded, optimized, stock, token_ids
from oracles import rewired

import dsa_compile
from dsa_compile.cache import DSACache
from dsa_compile.errors import ConfigError
from dsa_compile.passes.base import is_op

pytestmark = [pytest.mark.shared_graphs, pytest.mark.filterwarnings("ignore:plan=")]
LENGTH = 3 * TOPK


def late_model(device, layer0="previous_step"):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plan=")
        return optimized("deepseek_v32", device, plan="mli", layer0=layer0)


@pytest.fixture(scope="module")
def model(device):
    return late_model(device)


@pytest.fixture(scope="module")
def serial(device):
    return late_model(device, "serial")


@pytest.fixture
def ids(device):
    return token_ids(2, LENGTH + 2, device)


@pytest.fixture
def filled(model, ids):
    """Two sequences of `LENGTH` tokens, which keep different selections."""
    cache = model.make_cache(2, 64)
    with torch.no_grad():
        model(ids[:, :LENGTH], past_key_values=cache)
    assert not torch.equal(*cache.layers[0].kept)
    return cache


def following(model, ids, cache):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def test_one_token_waits_for_no_selection_in_its_first_layer(model, ids, graphs):
    torch._dynamo.reset()
    cache = model.make_cache(2, 64)
    following(model, ids[:, :LENGTH], cache)
    following(model, ids[:, LENGTH : LENGTH + 1], cache)
    nodes = list(graphs[-1].graph.nodes)
    first, second = [i for i, n in enumerate(nodes) if is_op(n, "select_start")]
    attend = [i for i, n in enumerate(nodes) if is_op(n, "sparse_mla")]
    waits = [i for i, n in enumerate(nodes) if is_op(n, "select_wait")]
    assert first < attend[0] < second < waits[0] < attend[1] < waits[1] < attend[2]
    (keep,) = [n for n in nodes if is_op(n, "keep_selection")]
    assert keep.args[2] is nodes[first]
    assert keep.next.op == "output"


def test_equals_the_stock_model_whose_first_layer_is_a_token_late(model, ids, device):
    assert model.dsa.plan.letters == "LLS"
    with torch.no_grad():
        want = rewired(stock("deepseek_v32", device), model.dsa.plan.sources, previous_step=True)(ids, use_cache=False)
        assert_rows_equal(model(ids, use_cache=False).logits, want.logits)


def test_calls_of_any_length_are_one_call(model, graphs, device):
    ids, inputs = token_ids(2, LENGTH, device), left_padded(2, LENGTH, device)
    mask, cache, parts = inputs["attention_mask"], model.make_cache(2, 64), []
    for start, end in ((0, 2), (2, 10), (10, 11), (11, 12), (12, LENGTH)):
        with torch.no_grad():
            part = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        parts.append(part.logits)
    with torch.no_grad():
        assert_rows_equal(torch.cat(parts, 1), model(ids, use_cache=False, **inputs).logits, mask)
    assert len(graphs) <= 3


@pytest.mark.slow
def test_compiled_is_eager(model, ids, device):
    compiled = optimized("deepseek_v32", device, "inductor", plan="mli", layer0="previous_step")
    ours, theirs = compiled.make_cache(2, 64), model.make_cache(2, 64)
    for part in ids.split([LENGTH - 3, 1, 1, 3], 1):
        assert_rows_equal(following(compiled, part, ours), following(model, part, theirs))
    for cache in (ours, theirs):
        cache.crop(-1)
    assert_rows_equal(following(compiled, ids[:, -1:], ours), following(model, ids[:, -1:], theirs))
    assert torch.equal(ours.layers[0].kept, theirs.layers[0].kept)


def reordered(cache, path):
    cache.reorder_cache(torch.tensor([1, 0], device=cache.device))
    return cache


def repeated(cache, path):
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0], device=cache.device))
    return cache


def reloaded(cache, path):
    cache.save(path)
    return reordered(DSACache.load(path, device=cache.device), path)


@pytest.mark.parametrize("move", [reordered, repeated, reloaded])
def test_a_kept_selection_goes_where_its_sequence_goes(move, model, ids, filled, tmp_path):
    new = ids[:, LENGTH : LENGTH + 1]
    want = following(model, new, copy.deepcopy(filled))
    moved = move(filled, tmp_path / "cache")
    assert_rows_equal(following(model, new.flip(0), moved), want.flip(0))


def test_a_cache_that_is_reset_is_new(model, ids, filled):
    filled.reset()
    assert torch.equal(
        following(model, ids[:, :LENGTH].flip(0), filled),
        following(model, ids[:, :LENGTH].flip(0), model.make_cache(2, 64)),
    )


def interrupted(model, ids, cache):
    run = model.dsa_guard._run

    def stop(*args):
        run(*args)
        raise KeyboardInterrupt

    model.dsa_guard._run = stop
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(ids[:, LENGTH:], past_key_values=cache)
    model.dsa_guard._run = run


def cropped(model, ids, cache):
    cache.crop(-2)


@pytest.mark.parametrize("change", [interrupted, cropped])
def test_where_the_token_before_is_another_the_first_layer_waits_for_its_own(change, model, serial, ids, filled):
    before = following(model, ids[:, -1:], copy.deepcopy(filled))
    change(model, ids, filled)
    twin = serial.make_cache(2, 64)
    for ours, theirs in zip(filled.layers, twin.layers):
        theirs.latent.copy_(ours.latent)
        theirs.index_keys.copy_(ours.index_keys)
    twin.lengths.valid, twin.lengths.seen = filled.lengths.valid.clone(), filled.lengths.seen.clone()
    twin.lengths.bound = filled.lengths.bound
    want = following(serial, ids[:, -1:], twin)
    assert_rows_equal(following(model, ids[:, -1:], filled), want)
    assert (before - want).abs().max() > 1e-2
    assert filled.lengths.current


def test_without_a_backend_nothing_is_kept(ids, device):
    plain = dsa_compile.prepare(copy.deepcopy(stock("deepseek_v32", device)), plan="mli", layer0="previous_step")
    cache = plain.make_cache(2, 64)
    following(plain, ids, cache)
    assert not cache.lengths.current


def test_drafts_would_leave_the_selection_of_a_rejected_token():
    with pytest.raises(ConfigError, match="layer0='previous_step' with mtp="):
        dsa_compile.DSAConfig(plan="mli", layer0="previous_step", mtp={})
