"""A prompt that runs in pieces gives what it gives in one, and counts only when all of it went through."""

import pytest
import torch
from cases import left_padded, token_ids
from mtp import drafting, prepared

from dsa_compile.cost.workspace import pieces, token_bytes
from dsa_compile.dims import LayerDims
from dsa_compile.errors import CacheCapacityError

LENGTH, ROWS = 27, 3


def in_pieces(device, tokens, make=prepared, **fields):
    """A model whose prompts run in pieces of at most ``tokens`` columns of `ROWS` sequences."""
    budget = tokens * ROWS * make("deepseek_v32", device).workspace_bytes()
    return make("deepseek_v32", device, prefill_budget=budget, **fields)


def batch(device, padding=True):
    inputs = {"input_ids": token_ids(ROWS, LENGTH, device)}
    return inputs | left_padded(ROWS, LENGTH, device) if padding else inputs


@pytest.fixture
def widths(monkeypatch):
    """Columns of each forward."""
    seen = []

    def watch(model):
        model.model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        return seen

    return watch


def assert_same_cache(ours, theirs):
    assert torch.equal(ours.lengths.valid, theirs.lengths.valid)
    assert torch.equal(ours.lengths.seen, theirs.lengths.seen)
    assert ours.lengths.bound == theirs.lengths.bound
    for one, two in zip(ours.layers, theirs.layers):
        for name, pool in one.pools().items():
            torch.testing.assert_close(pool, two.pools()[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [prepared, drafting], ids=["plain", "with an MTP layer"])
def test_pieces_give_what_the_whole_gives(device, widths, make):
    """The first piece holds nothing but padding of the most padded sequence."""
    one, two = make("deepseek_v32", device), in_pieces(device, 5, make)
    seen = widths(two)
    with torch.no_grad():
        whole, parts = (model(**batch(device), logits_to_keep=2) for model in (one, two))
    assert seen == [4, 5, 4, 5, 4, 5]
    torch.testing.assert_close(parts.logits, whole.logits, atol=1e-5, rtol=0)
    assert_same_cache(parts.past_key_values, whole.past_key_values)
    if make is drafting:
        states = (output.past_key_values.lengths.state for output in (parts, whole))
        torch.testing.assert_close(*states, atol=1e-5, rtol=0)


def test_generate_prefills_in_pieces(device, widths):
    arguments = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 4}
    want = prepared("deepseek_v32", device).generate(**batch(device), **arguments)
    model = in_pieces(device, 9)
    seen = widths(model)
    assert torch.equal(model.generate(**batch(device), **arguments), want)
    assert seen == [9, 9, 9, 1, 1, 1]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logits_to_keep": 6},
        {"logits_to_keep": 2, "output_hidden_states": True},
        {"labels": torch.zeros(ROWS, LENGTH).long()},
    ],
)
def test_what_is_asked_of_every_token_runs_whole(device, widths, asked):
    model = in_pieces(device, 5)
    seen = widths(model)
    asked = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in asked.items()}
    with torch.no_grad():
        model(**batch(device), use_cache=True, **asked)
    assert seen == [LENGTH]


def test_a_call_that_breaks_in_a_later_piece_counts_nothing(device):
    model, breaking = in_pieces(device, 9, drafting), []
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: breaking.pop())
    cache, inputs = model.make_cache(ROWS, 64), batch(device)
    before = {name: value for name, value in vars(cache.lengths).items() if name != "current"}
    breaking[:] = [None, None]
    with pytest.raises(IndexError), torch.no_grad():
        model(**inputs, past_key_values=cache, logits_to_keep=1)
    assert all(vars(cache.lengths)[name] is value for name, value in before.items())
    hook.remove()
    with torch.no_grad():
        again = model(**inputs, past_key_values=cache, logits_to_keep=1)
        want = drafting("deepseek_v32", device)(**inputs, logits_to_keep=1)
    torch.testing.assert_close(again.logits, want.logits, atol=1e-5, rtol=0)


def test_a_prompt_without_room_writes_no_piece(device, widths):
    model = in_pieces(device, 9)
    seen = widths(model)
    with pytest.raises(CacheCapacityError), torch.no_grad():
        model(**batch(device, padding=False), past_key_values=model.make_cache(ROWS, LENGTH - 1), logits_to_keep=1)
    assert not seen


@pytest.mark.parametrize(("tokens", "most", "lengths"), [(0, 4, [0]), (4, 4, [4]), (5, 4, [2, 3]), (9, 4, [3, 3, 3])])
def test_pieces_are_few_and_of_nearly_one_length(tokens, most, lengths):
    found = pieces(tokens, most)
    assert [part.stop - part.start for part in found] == lengths
    assert [part.start for part in found][1:] == [part.stop for part in found][:-1]


def test_bytes_of_a_token_of_deepseek_v32():
    """128 heads: q 192, absorbed 576, latent output 512, output 128; eight routed experts take less."""
    dims = LayerDims(n_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    sizes = {"hidden": 7168, "intermediate": 18432, "expert_intermediate": 2048, "routed_experts": 8, "itemsize": 2}
    assert token_bytes(dims, **sizes) == 2 * (6 * 7168 + 128 * (192 + 576 + 512 + 128))
    assert token_bytes(dims, **sizes | {"routed_experts": 16}) == 2 * (6 * 7168 + 16 * (3 * 2048 + 2 * 7168))
