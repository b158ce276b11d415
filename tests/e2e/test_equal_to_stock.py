"""An optimized model gives transformers' own logits and tokens, in every family and form of call."""

import pytest
import torch
from cases import (
    ALIKE,
    FAMILIES,
    LENGTHS,
    TOPK,
    assert_rows_equal,
    left_padded,
    optimized,
    stock,
    token_ids,
    with_positions,
)
from transformers import DynamicCache

pytestmark = pytest.mark.shared_graphs
each_family = pytest.mark.parametrize("case", FAMILIES)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((case, low), marks=pytest.mark.slow if low == "inductor" and case != "deepseek_v32" else ())
        for case in FAMILIES
        for low in ("eager", "inductor")
    ],
    ids="-".join,
)
def pair(request, device):
    """A stock model and its optimized copy; those that Inductor compiles, and `ALIKE` ones, have two layers."""
    case, lowering = request.param
    layers = 3 if lowering == "eager" and case not in ALIKE else 2
    yield stock(case, device, layers), optimized(case, device, lowering, layers)
    torch._dynamo.reset()


def forward(model, ids, cached=False, **inputs):
    with torch.no_grad():
        return model(ids, use_cache=cached, **inputs).logits


def test_lengths_around_k_with_and_without_a_cache(pair, device):
    reference, model = pair
    for length in LENGTHS:
        ids = token_ids(3, length, device)
        want = forward(reference, ids)
        assert_rows_equal(forward(model, ids), want)
        assert_rows_equal(forward(model, ids, cached=True), want)


def test_padding_holes_and_packed_documents(pair, device):
    reference, model = pair
    for length in (TOPK + 1, 5 * TOPK):
        ids = token_ids(3, length, device)
        hole = left_padded(3, length, device)["attention_mask"]
        hole[1, length // 2 : length // 2 + 3] = 0
        for inputs in (left_padded(3, length, device), with_positions(hole)):
            mask = inputs["attention_mask"]
            want = forward(reference, ids, **inputs)
            assert_rows_equal(forward(model, ids, **inputs), want, mask)
            assert_rows_equal(forward(model, ids, cached=True, **inputs), want, mask)
        packed = torch.cat([torch.arange(5), torch.arange(length - 5)])[None].to(device)
        assert_rows_equal(forward(model, ids, position_ids=packed), forward(reference, ids, position_ids=packed))


def test_one_piece_chunks_and_single_tokens_agree(pair, device):
    reference, model = pair
    length = 2 * TOPK + 3
    ids, inputs = token_ids(3, length, device), left_padded(3, length, device)
    mask, positions = inputs["attention_mask"], inputs["position_ids"]
    want = forward(reference, ids, **inputs)
    for steps in ([5, 1, 7, length - 13], [1] * length):
        cache, start, parts = model.make_cache(3, 64), 0, []
        for step in steps:
            end = start + step
            parts.append(
                forward(
                    model,
                    ids[:, start:end],
                    cached=True,
                    past_key_values=cache,
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                )
            )
            start = end
        assert_rows_equal(torch.cat(parts, 1), want, mask)
        assert cache.lengths.valid.tolist() == mask.sum(1).tolist()


def test_generate_greedy_beams_sampling_and_chunked_prefill(pair, device):
    reference, model = pair
    ids = token_ids(3, 2 * TOPK + 3, device)
    mask = left_padded(3, ids.shape[1], device)["attention_mask"]

    def both(**arguments):
        results = []
        for each in (reference, model):
            torch.manual_seed(5)
            results.append(each.generate(ids, attention_mask=mask, pad_token_id=0, eos_token_id=-1, **arguments))
        assert torch.equal(*results)

    both(max_new_tokens=64, do_sample=False)
    both(max_new_tokens=8, do_sample=True, top_k=20, temperature=0.8)
    both(max_new_tokens=8, do_sample=False, prefill_chunk_size=7)


@each_family
def test_beam_search(case, device):
    reference, model = stock(case, device), optimized(case, device)
    ids = token_ids(2, 2 * TOPK + 3, device)
    mask = left_padded(2, ids.shape[1], device)["attention_mask"]
    arguments = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 12, "num_beams": 2, "do_sample": False}
    assert torch.equal(model.generate(ids, **arguments), reference.generate(ids, **arguments))


@each_family
def test_generate_without_a_cache(case, device):
    reference, model = stock(case, device), optimized(case, device)
    ids, greedy = token_ids(2, TOPK, device), {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    assert torch.equal(model.generate(ids, **greedy), reference.generate(ids, **greedy))


@each_family
def test_a_second_padded_turn_equals_each_sequence_alone(case, device):
    reference, model = stock(case, device), optimized(case, device)
    first, second = token_ids(2, 14, device), token_ids(2, 9, device, seed=1)
    mask_1, mask_2 = (left_padded(2, n, device)["attention_mask"] for n in (14, 9))
    cache = model.make_cache(2, 128)
    greedy = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": -1}
    turn = model.generate(first, attention_mask=mask_1, past_key_values=cache, **greedy)
    ids = torch.cat([turn, second], 1)
    mask = torch.cat([mask_1, torch.ones_like(turn[:, 14:]), mask_2], 1)
    answer = model.generate(ids, attention_mask=mask, past_key_values=cache, **greedy)[:, ids.shape[1] :]
    for row in range(2):
        alone = ids[row][mask[row].bool()][None]
        want = reference.generate(alone, attention_mask=torch.ones_like(alone), **greedy)
        assert torch.equal(answer[row], want[0, alone.shape[1] :])


@each_family
def test_batch_of_one(case, device):
    reference, model = stock(case, device), optimized(case, device)
    for length in LENGTHS:
        ids = token_ids(1, length, device)
        assert_rows_equal(forward(model, ids), forward(reference, ids))
    cache, theirs = model.make_cache(1, 64), DynamicCache(config=reference.config)
    for step in token_ids(1, 2 * TOPK, device).split(1, dim=1):
        want = forward(reference, step, cached=True, past_key_values=theirs)
        assert_rows_equal(forward(model, step, cached=True, past_key_values=cache), want)


@each_family
def test_padded_rows_of_nan_change_no_valid_row(case, device):
    model = optimized(case, device)
    ids, inputs = token_ids(3, 2 * TOPK + 3, device), left_padded(3, 2 * TOPK + 3, device)
    mask = inputs["attention_mask"]
    embeds = model.get_input_embeddings()(ids).detach()
    poisoned = embeds.masked_fill(mask[..., None] == 0, float("nan"))
    for cached in (False, True):
        clean, dirty = (
            forward(model, None, cached=cached, inputs_embeds=x, **inputs)[mask.bool()] for x in (embeds, poisoned)
        )
        torch.testing.assert_close(dirty, clean, atol=1e-6, rtol=0)
