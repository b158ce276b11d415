"""Plain decoding by steps of our own gives the tokens and the cache of transformers' loop."""

import re
from dataclasses import replace

import pytest
import torch
from cases import TOPK, left_padded, token_ids
from mtp import prepared
from transformers.generation.streamers import BaseStreamer

from dsa_compile import lending
from dsa_compile.compiled import Compiled
from dsa_compile.errors import CacheCapacityError
from dsa_compile.explanation import Explanation
from dsa_compile.lending import bucket
from dsa_compile.models import prepared as prepared_models
from dsa_compile.replay import Decoder

LENGTH = TOPK + 3
NEW = 8
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
V32 = "deepseek_v32"


class Printed(BaseStreamer):
    def __init__(self):
        self.columns, self.ended = [], False

    def put(self, value):
        self.columns.append(value)

    def end(self):
        self.ended = True


@pytest.fixture
def steps(monkeypatch):
    """Lets `generate` decode by itself, uncompiled, and counts its steps."""
    launched = []
    launch = Decoder.launch
    monkeypatch.setattr(Decoder, "launch", lambda decoder: (launched.append(1), launch(decoder)))
    init = Decoder.__init__
    monkeypatch.setattr(Decoder, "__init__", lambda *args, recorded: init(*args, recorded=False))
    monkeypatch.setattr(Compiled, "replays", True)
    return launched


def batch(device, rows=3):
    return {"input_ids": token_ids(rows, LENGTH, device)} | left_padded(rows, LENGTH, device)


def both(monkeypatch, device, case=V32, **arguments):
    """What `generate` returns by its own steps, and by transformers' loop."""
    model = prepared(case, device)
    outputs = []
    for own in (True, False):
        monkeypatch.setattr(Compiled, "replays", own)
        outputs.append(model.generate(**batch(device), **{**GREEDY, **arguments}, return_dict_in_generate=True))
    return outputs


def assert_same(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    one, two = ours.past_key_values, theirs.past_key_values
    assert torch.equal(one.lengths.valid, two.lengths.valid)
    assert torch.equal(one.lengths.seen, two.lengths.seen)
    for own, other in zip(one.layers, two.layers):
        for name, pool in own.pools().items():
            for row, length in enumerate(one.lengths.valid.tolist()):
                torch.testing.assert_close(pool[row, :length], other.pools()[name][row, :length], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "case", [V32, *(pytest.param(case, marks=pytest.mark.slow) for case in ("deepseek_v3", "glm_moe_dsa"))]
)
def test_tokens_and_cache_are_those_of_transformers_loop(steps, monkeypatch, device, case):
    assert_same(*both(monkeypatch, device, case))
    assert len(steps) == NEW - 1


def test_sequences_that_end_early_keep_what_they_have(steps, monkeypatch, device):
    endless = both(monkeypatch, device)[0].sequences
    eos = endless[0, LENGTH + 3].item()
    ours, theirs = both(monkeypatch, device, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(ours.sequences, theirs.sequences)
    (end,) = (ours.sequences[0, LENGTH:] == eos).nonzero()[:1, 0].tolist()
    assert ours.past_key_values.lengths.valid[0] == theirs.past_key_values.lengths.valid.max() - (
        theirs.past_key_values.lengths.padded - LENGTH - end
    )


def test_nothing_is_written_to_a_finished_sequence_but_by_the_step_ahead(steps, device):
    model, inputs = prepared(V32, device), batch(device)
    free = model.generate(**inputs, **GREEDY)[0, LENGTH:].tolist()
    eos = next(token for token in free if token != free[0])
    told = GREEDY | {"eos_token_id": eos, "pad_token_id": 0, "return_dict_in_generate": True}
    cache = model.generate(**inputs, **told, past_key_values=model.make_cache(3, 64)).past_key_values
    new = cache.lengths.valid - inputs["attention_mask"].sum(1)
    assert 0 < new[0] < new.max() - 2
    for layer in cache.layers:
        assert not any(pool[0, cache.lengths.valid[0] + 1 :].any() for pool in layer.pools().values())


def test_a_second_turn_continues_the_first(steps, monkeypatch, device):
    model = prepared(V32, device)
    inputs = batch(device)
    first = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, NEW, dtype=torch.int64, device=device)], 1)
    cache = {"past_key_values": first.past_key_values, "attention_mask": mask}
    with pytest.raises(CacheCapacityError, match="nothing was written"):
        model.generate(first.sequences, **cache, **{**GREEDY, "max_new_tokens": 500})
    second = model.generate(first.sequences, **cache, **GREEDY)
    monkeypatch.setattr(Compiled, "replays", False)
    assert torch.equal(second, model.generate(**inputs, **{**GREEDY, "max_new_tokens": 2 * NEW}))


def test_sampled_tokens_follow_the_distribution(steps, device):
    model, sampling = prepared(V32, device), {"do_sample": True, "top_k": 4, "temperature": 0.7}
    prompt = token_ids(1, LENGTH, device).expand(600, -1)
    drawn = model.generate(prompt, **{**GREEDY, **sampling, "max_new_tokens": 2})[:, LENGTH:]
    first = drawn[:, 0].mode().values
    rows = drawn[drawn[:, 0] == first]
    with torch.no_grad():
        logits = model(torch.cat([prompt[:1], first[None, None]], 1)).logits[0, -1]
    best = logits.topk(4)
    want = (best.values / 0.7).softmax(-1)
    found = torch.stack([(rows[:, 1] == token).float().mean() for token in best.indices])
    assert found.sum() == 1
    torch.testing.assert_close(found, want, atol=4 * (0.25 / len(rows)) ** 0.5, rtol=0)
    assert len(steps) == 1


def test_a_repetition_penalty_counts_prompt_padding_and_new_tokens(steps, monkeypatch, device):
    free, _ = both(monkeypatch, device)
    ours, theirs = both(monkeypatch, device, repetition_penalty=1.5)
    assert_same(ours, theirs)
    assert len(steps) == 2 * (NEW - 1)
    assert not torch.equal(ours.sequences, free.sequences)


def test_what_was_seen_of_earlier_sequences_does_not_count(steps, device):
    model, arguments = prepared(V32, device), GREEDY | {"repetition_penalty": 1.5}
    first, second = (token_ids(2, LENGTH, device, seed) for seed in range(2))
    want = prepared(V32, device).generate(second, **arguments)
    model.generate(first, **arguments)
    assert torch.equal(model.generate(second, **arguments), want)


@pytest.mark.parametrize("arguments", [{"num_beams": 2}, {"no_repeat_ngram_size": 2}, {"output_scores": True}])
def test_what_a_step_cannot_show_is_left_to_transformers(steps, monkeypatch, device, arguments):
    ours, theirs = both(monkeypatch, device, **arguments)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert not steps


def test_a_streamer_gets_every_token(steps, device):
    printed = Printed()
    model = prepared(V32, device)
    sequences = model.generate(token_ids(1, LENGTH, device), **GREEDY, streamer=printed)
    assert torch.equal(torch.cat([x.flatten() for x in printed.columns]), sequences[0].cpu())
    assert printed.ended


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_call_that_breaks_off_leaves_the_cache_as_the_prompt_did(steps, monkeypatch, device, error):
    model, prompt = prepared(V32, device), token_ids(1, LENGTH, device)
    want, cache, launch = model.generate(prompt, **GREEDY), model.make_cache(1, 64), Decoder.launch

    def breaking(decoder):
        launch(decoder)
        if len(steps) == NEW + 3:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "launch", breaking)
        with pytest.raises(error):
            model.generate(prompt, **GREEDY, past_key_values=cache)
    assert cache.lengths.valid.tolist() == [LENGTH]
    cache.reset()
    assert torch.equal(model.generate(prompt, **GREEDY, past_key_values=cache), want)
    assert torch.equal(model.generate(prompt, **GREEDY), want)


@pytest.mark.parametrize(("error", "caches"), [(KeyboardInterrupt, 1), (torch.OutOfMemoryError, 2)])
def test_the_memory_of_a_call_that_breaks_off_serves_the_next(steps, monkeypatch, device, error, caches):
    """Though whoever looks at the traceback holds it; not where memory was short."""
    model, prompt, made, launch = prepared(V32, device), token_ids(1, LENGTH, device), [], Decoder.launch
    monkeypatch.setattr(model, "cache_for", lambda *sizes: made.append(sizes) or type(model).cache_for(model, *sizes))
    want = model.generate(prompt, **GREEDY)

    def breaking(decoder):
        launch(decoder)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "launch", breaking)
        with pytest.raises(error) as held:
            model.generate(prompt, **GREEDY)
    assert held.traceback
    assert torch.equal(model.generate(prompt, **GREEDY), want)
    assert len(made) == caches


def test_steps_are_made_once_for_pools_that_stay(steps, device):
    model, prompt = prepared(V32, device), token_ids(2, LENGTH, device)
    cache = model.make_cache(2, 64)
    made = set()
    for _ in range(2):
        cache.reset()
        model.generate(prompt, **GREEDY, past_key_values=cache)
        made |= set(model.dsa_guard.compiled._decoders[cache][1].values())
    assert len(made) == 1
    cache.batch_select_indices(torch.tensor([1, 0]))
    cache.reset()
    model.generate(prompt, **GREEDY, past_key_values=cache)
    assert made.isdisjoint(model.dsa_guard.compiled._decoders[cache][1].values())


def test_what_is_recorded_is_said_with_its_memory(steps, device):
    """Of two calls in one bucket, and one that samples."""
    model = prepared(V32, device)
    for rows, sampling in ((3, {}), (4, {}), (3, {"do_sample": True})):
        model.generate(token_ids(rows, LENGTH, device), **GREEDY | sampling)
    found = model.recordings()
    assert [(r.batch_size, r.capacity, r.sampling.greedy) for r in found] == [(4, 256, True), (4, 256, False)]
    explained = Explanation(V32, "indexer", TOPK, "FFF", 256, [], {}, tuple(replace(r, bytes=3 << 20) for r in found))
    assert re.findall(r"4 │\s+256 │ (3\.0) │ (\w+)", str(explained)) == [("3.0", "greedy"), ("3.0", "sampled")]
    assert "recorded" not in str(replace(explained, recordings=()))


def test_calls_find_the_memory_and_the_steps_of_earlier_ones(steps, monkeypatch, device):
    """Three sequences, then four shorter ones in the same rows, then more tokens than there is room for."""
    model, plain = prepared(V32, device), prepared(V32, device)
    made = []
    monkeypatch.setattr(prepared_models, "CAPACITY_STEP", 32)
    monkeypatch.setattr(model, "cache_for", lambda *sizes: made.append(sizes) or type(model).cache_for(model, *sizes))
    for inputs, new in (
        (batch(device, 3), NEW),
        (batch(device, 4), 5),
        (batch(device, 2), NEW),
        (batch(device, 3), 3 * NEW),
    ):
        arguments = {**GREEDY, "max_new_tokens": new}
        monkeypatch.setattr(Compiled, "replays", False)
        want = plain.generate(**inputs, **arguments)
        monkeypatch.setattr(Compiled, "replays", True)
        assert torch.equal(model.generate(**inputs, **arguments), want)
    assert [rows for rows, _ in made] == [4, 2, 4]


def test_a_cache_that_is_handed_out_is_its_callers(steps, device):
    model, arguments = prepared(V32, device), GREEDY | {"return_dict_in_generate": True}
    first, second = (model.generate(**batch(device), **arguments).past_key_values for _ in range(2))
    assert first.layers[0].latent.data_ptr() != second.layers[0].latent.data_ptr()


def test_sequences_are_padded_to_few_numbers_of_rows():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [1, 2, 4, 4, 8, 8, 16, 16, 24]


@pytest.mark.parametrize("replays", [True, False])
def test_what_the_device_cannot_hold_is_refused_with_a_table(steps, monkeypatch, device, replays):
    model = prepared(V32, device)
    monkeypatch.setattr(Compiled, "replays", replays)
    weights = sum(p.nbytes for p in model.parameters())
    token = sum(model.make_cache(1, 1).bytes_per_token())
    prompt = 2 * 263 * model.workspace_bytes()
    monkeypatch.setattr(lending, "device_memory", lambda device: (weights + 512 * token + prompt) / 0.9 + 1)
    assert model.generate(token_ids(1, LENGTH, device), **GREEDY).shape[1] == LENGTH + NEW
    with pytest.raises(CacheCapacityError, match="nothing was allocated") as error:
        model.generate(token_ids(2, 256, device), **GREEDY)
    assert re.search(r"sequences of 263 tokens that fit\W+1\b", str(error.value))
    assert model.generate(token_ids(1, LENGTH, device), **GREEDY).shape[1] == LENGTH + NEW


def test_idle_memory_makes_room(steps, monkeypatch, device):
    """Room for one cache of two sequences or two of one, of 256 slots each: not for both kinds at once."""
    model = prepared(V32, device)
    held = sum(p.nbytes for p in model.parameters()) + model.workspace_bytes() * 2 * (LENGTH + NEW)
    token = sum(model.make_cache(1, 1).bytes_per_token())
    monkeypatch.setattr(lending, "device_memory", lambda device: (held + 2 * 256 * token) / 0.9)
    for rows, idle in ((1, {1}), (2, {2}), (2, {2})):
        model.generate(batch(device, rows)["input_ids"], **GREEDY)
        assert set(model.dsa_guard.compiled.lender._idle) == idle
