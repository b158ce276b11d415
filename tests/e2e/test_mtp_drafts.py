"""What the MTP layer drafts, and what its part of the cache holds, against a second derivation in float64."""

import pytest
import torch
from cases import ATOL, TOPK, left_padded, token_ids
from mtp import FAMILIES_WITH_MTP, FAULTS, LAYERS, draft_logits, drafting, naive_draft_logits

from dsa_compile.cache import DSACache

DRAFTS = 3
LENGTH = 2 * TOPK + 4
GLM = "glm_moe_dsa"


@pytest.fixture(scope="module")
def model(device):
    return drafting(GLM, device, drafts=DRAFTS)


def prompt(model, device, calls=((0, LENGTH - 1),)):
    """A cache of three sequences padded on the left, filled by a call for each range of columns, and what follows."""
    ids, inputs = token_ids(3, LENGTH, device), left_padded(3, LENGTH, device)
    cache = model.make_cache(3, 2 * LENGTH)
    for start, end in calls:
        sliced = {"attention_mask": inputs["attention_mask"][:, :end], "position_ids": inputs["position_ids"]}
        sliced["position_ids"] = sliced["position_ids"][:, start:end]
        with torch.no_grad():
            model(ids[:, start:end], past_key_values=cache, **sliced)
    return cache, ids, inputs["attention_mask"].bool()


def rows(cache, drop=0):
    """Every row in use, layer by layer; the MTP layer has one less than the others."""
    lengths = [(layer, n - (layer == LAYERS)) for layer in range(LAYERS + 1) for n in cache.lengths.valid.tolist()]
    sequences = list(range(cache.batch_size)) * (LAYERS + 1)
    return [
        pool[b, : n - drop]
        for (layer, n), b in zip(lengths, sequences)
        for pool in cache.layers[layer].pools().values()
    ]


@pytest.mark.parametrize("case", FAMILIES_WITH_MTP)
def test_drafts_are_by_the_checkpoints_definition(case, device):
    model = drafting(case, device, drafts=DRAFTS)
    cache, ids, tokens = prompt(model, device)
    ours = draft_logits(model, cache, ids[:, -1])
    for b in range(3):
        naive = naive_draft_logits(case, device, ids[b][tokens[b]], DRAFTS)
        torch.testing.assert_close(ours[b].double(), naive, atol=ATOL, rtol=0)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_definition_tells_faults_apart(device, fault):
    ids = token_ids(1, LENGTH, device)[0]
    right, wrong = (naive_draft_logits(GLM, device, ids, 1, made) for made in (None, fault))
    assert (right - wrong).abs().max() > 50 * ATOL


CHUNKS = {
    "two": ((0, 7), (7, LENGTH - 1)),
    "single tokens": ((0, 3), (3, 4), (4, 5), (5, LENGTH - 1)),
}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_and_prefixes_fill_it_as_one_call_does(model, device, chunks):
    whole, ids, _ = prompt(model, device)
    cache, _, _ = prompt(model, device, CHUNKS[chunks])
    torch.testing.assert_close(rows(cache), rows(whole), atol=1e-5, rtol=0)
    torch.testing.assert_close(cache.lengths.state, whole.lengths.state, atol=1e-5, rtol=0)
    last = ids[:, -1]
    torch.testing.assert_close(draft_logits(model, cache, last), draft_logits(model, whole, last), atol=ATOL, rtol=0)


def test_a_crop_forgets_the_state_and_keeps_the_rows(model, device):
    whole, _, _ = prompt(model, device)
    cache, _, _ = prompt(model, device)
    cache.crop(-2)
    assert cache.lengths.valid.tolist() == [n - 2 for n in whole.lengths.valid.tolist()]
    assert all(torch.equal(one, two) for one, two in zip(rows(cache), rows(whole, drop=2)))
    assert not cache.lengths.state.any()


def test_sequences_take_their_state_along(model, device, tmp_path):
    cache, ids, _ = prompt(model, device)
    want = draft_logits(model, cache, ids[:, -1])
    cache.save(tmp_path / "cache")
    order = torch.tensor([2, 0, 1], device=device)
    loaded = DSACache.load(tmp_path / "cache", capacity=2 * LENGTH, device=device)
    torch.testing.assert_close(draft_logits(model, loaded, ids[:, -1]), want, atol=ATOL, rtol=0)
    loaded.reorder_cache(order)
    torch.testing.assert_close(draft_logits(model, loaded, ids[order, -1]), want[order], atol=ATOL, rtol=0)
    loaded.reset()
    assert not loaded.lengths.state.any()


def test_embeddings_fill_it_as_tokens_do(model, device):
    ids = token_ids(2, LENGTH, device)
    one, two = model.make_cache(2, LENGTH), model.make_cache(2, LENGTH)
    with torch.no_grad():
        model(ids, past_key_values=one)
        model(inputs_embeds=model.model.embed_tokens(ids), past_key_values=two)
    torch.testing.assert_close(rows(two), rows(one), atol=1e-5, rtol=0)
    assert torch.equal(two.lengths.state, one.lengths.state)
