"""Plain decoding as a GPU runs it, one replay a token: the tokens of uncompiled steps, whatever breaks it off."""

import pytest
import torch
from cases import TOPK, optimized, token_ids
from mtp import LAYERS, drafting, prepared

from dsa_compile.errors import CacheCapacityError
from dsa_compile.replay import Decoder

pytestmark = [
    pytest.mark.shared_graphs,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs"),
]
V32, LENGTH, NEW = "deepseek_v32", TOPK + 3, 24
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def model(device):
    """In float32, so that tokens do not depend on who computes them."""
    made = optimized(V32, device, lowering="inductor", layers=LAYERS)
    made.set_experts_implementation("batched_mm")
    return made


@pytest.fixture(scope="module")
def plain(device):
    return prepared(V32, device)


@pytest.fixture
def launched(monkeypatch):
    """How many steps were started."""
    steps, launch = [], Decoder.launch
    monkeypatch.setattr(Decoder, "launch", lambda decoder: (steps.append(1), launch(decoder)))
    return steps


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_those_of_uncompiled_steps(model, plain, device, launched, rows, penalty):
    assert model.dsa_guard.compiled.replays
    prompt, arguments = token_ids(rows, LENGTH, device), GREEDY | {"repetition_penalty": penalty}
    assert torch.equal(model.generate(prompt, **arguments), plain.generate(prompt, **arguments))
    assert len(launched) == NEW - 1


def test_the_host_waits_for_nothing_but_tokens(model, device, monkeypatch):
    """Of three sequences, each of which ends at another step."""
    prompt = token_ids(3, LENGTH, device)
    endless = model.generate(prompt, **GREEDY)[:, LENGTH:]
    ends = [endless[row, 3 * row + 2].item() for row in range(3)]
    from dsa_compile import decode

    run = decode.run

    def watched(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(decode, "run", watched)
    sequences = model.generate(prompt, **GREEDY | {"eos_token_id": ends})[:, LENGTH:]
    assert sequences.shape[1] < NEW
    for row, tokens in enumerate(sequences):
        kept = next(i for i, token in enumerate(endless[row].tolist()) if token in ends) + 1
        assert torch.equal(tokens[:kept], endless[row, :kept])


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_call_that_breaks_off_leaves_model_and_cache_usable(model, plain, device, monkeypatch, launched, error):
    prompt, cache, launch = token_ids(1, LENGTH, device), model.make_cache(1, 64), Decoder.launch
    want = plain.generate(prompt, **GREEDY)

    def breaking(decoder):
        launch(decoder)
        if len(launched) == NEW // 2:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "launch", breaking)
        with pytest.raises(error):
            model.generate(prompt, **GREEDY, past_key_values=cache)
    assert cache.lengths.valid.tolist() == [LENGTH]
    cache.reset()
    assert torch.equal(model.generate(prompt, **GREEDY, past_key_values=cache), want)
    assert torch.equal(model.generate(prompt, **GREEDY), want)


def test_a_gpu_that_is_full_refuses_a_call_and_serves_the_next(model, plain, device):
    prompt = token_ids(1, LENGTH, device)
    want = plain.generate(prompt, **GREEDY)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    filler = torch.empty(free - (64 << 20), dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(token_ids(64, 4096, device), **GREEDY)
    assert torch.equal(model.generate(prompt, **GREEDY), want)
    del filler
    torch.cuda.empty_cache()
    assert torch.equal(model.generate(prompt, **GREEDY), want)


def test_a_context_beyond_the_cache_and_a_batch_beyond_the_gpu_are_refused(model, plain, device):
    prompt, cache = token_ids(2, LENGTH, device), model.make_cache(2, LENGTH + NEW)
    first = model.generate(prompt, **GREEDY, past_key_values=cache)
    held = cache.lengths.valid.clone()
    with pytest.raises(CacheCapacityError, match="nothing was written"):
        model.generate(first, **GREEDY, past_key_values=cache)
    assert torch.equal(cache.lengths.valid, held)
    with pytest.raises(CacheCapacityError, match="nothing was allocated"):
        model.generate(token_ids(1 << 14, LENGTH, device), **GREEDY | {"max_new_tokens": 1 << 16})
    assert torch.equal(model.generate(prompt, **GREEDY), plain.generate(prompt, **GREEDY))


@pytest.mark.parametrize("drafts", [1, 3, "auto"])
def test_steps_with_drafts_replay_and_give_plain_tokens(plain, device, drafts):
    """Whatever ends inside a block; a later call records nothing."""
    model = drafting(V32, device, drafts=drafts, lowering="inductor")
    model.set_experts_implementation("batched_mm")
    kept = []
    for rows in (1, 3, 1, 3):
        prompt, arguments = token_ids(rows, LENGTH, device), dict(GREEDY)
        arguments["eos_token_id"] = int(plain.generate(prompt, **arguments)[0, LENGTH + 9])
        output = model.generate(prompt, **arguments, return_dict_in_generate=len(kept) > 2)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        assert torch.equal(sequences, plain.generate(prompt, **arguments))
        kept.append(model.recordings())
    assert [recorded.batch_size for recorded in kept[1]] == [1, 4]
    assert all(recorded.bytes > 0 for recorded in kept[1])
    assert drafts == "auto" or kept[3] == kept[1]


def test_a_recording_says_what_memory_it_took(model, device):
    cache = model.make_cache(1, 64)
    model.generate(token_ids(1, LENGTH, device), **GREEDY, past_key_values=cache)
    (recorded,) = [r for r in model.recordings() if (r.batch_size, r.capacity) == (1, 64)]
    assert 0 < recorded.bytes < 1 << 30
