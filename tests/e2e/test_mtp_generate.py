"""`generate` with drafts gives the tokens of `generate` without, and leaves the cache as that does."""

import copy
import itertools
import pickle

import pytest
import torch
from cases import TOPK, left_padded, token_ids
from mtp import FAMILIES_WITH_MTP, LAYERS, drafting, prepared
from transformers import AutoTokenizer, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import dsa_compile.models.mtp_step as mtp_step
from dsa_compile.compiled import Compiled
from dsa_compile.errors import CacheCapacityError
from dsa_compile.pace import Pace
from dsa_compile.replay_drafts import DraftDecoder

LENGTH = TOPK + 3
NEW = 12
ENDLESS = {"do_sample": False, "eos_token_id": None}
V32 = "deepseek_v32"


@pytest.fixture(autouse=True, params=["seen by the host", "ahead of the host"])
def steps(request, monkeypatch):
    """Every test runs with steps that wait for the host, and with those that a GPU records, uncompiled."""
    if request.param == "ahead of the host":
        init = DraftDecoder.__init__
        monkeypatch.setattr(DraftDecoder, "__init__", lambda *args, recorded: init(*args, recorded=False))
        monkeypatch.setattr(Compiled, "replays", property(lambda compiled: bool(compiled._model.dsa.drafts)))
    return request.param


@pytest.fixture(scope="module")
def plain(device):
    return prepared(V32, device)


@pytest.fixture(scope="module")
def model(device):
    return drafting(V32, device, drafts=3)


@pytest.fixture
def lucky(monkeypatch, device):
    """Makes drafts right at random: each with probability ``rate``, given what plain decoding continues with."""

    def install(truth, rate):
        def draft(model, cache, fresh, states, count, place):
            tokens = real(model, cache, fresh, states, count, place)
            behind = place.valid[:, None] + torch.arange(1, tokens.shape[1], device=device)
            every = torch.nn.functional.pad(truth, (0, 0, 0, len(tokens) - len(truth)))  # a cache may have more rows
            right = every.gather(1, behind.clamp(max=truth.shape[1] - 1))
            hit = torch.rand(right.shape, generator=generator).to(device) < rate
            return torch.cat([tokens[:, :1], torch.where(hit, right, tokens[:, 1:])], 1)

        real, generator = mtp_step.draft, torch.Generator().manual_seed(3)
        monkeypatch.setattr(mtp_step, "draft", draft)

    return install


def batch(device, rows=3):
    return {"input_ids": token_ids(rows, LENGTH, device)} | left_padded(rows, LENGTH, device)


def without_padding(sequences, mask):
    """The sequences moved to the left over their padding, which goes to the right."""
    order = torch.argsort(
        1 - torch.nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1), stable=True
    )
    return sequences.gather(1, order)


def assert_same_cache(ours, theirs, model):
    """Every row of the model's layers as plain decoding wrote it, of the MTP layer as one prompt would."""
    for one, two in zip(ours.layers, theirs.layers, strict=True):
        for name, pool in one.pools().items():
            for b, n in enumerate(theirs.lengths.valid.tolist()):
                rows = slice(0, n - (one is ours.layers[LAYERS]))
                torch.testing.assert_close(pool[b, rows], two.pools()[name][b, rows], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.lengths.state, theirs.lengths.state, atol=1e-4, rtol=0)
    assert torch.equal(ours.lengths.seen, theirs.lengths.seen)
    assert (ours.lengths.slots, ours.lengths.next_state) == (None, None)


@pytest.mark.parametrize(
    ("drafts", "new"), [(1, NEW), (2, NEW), (3, NEW), pytest.param(2, 500, marks=pytest.mark.slow)]
)
def test_any_pattern_of_acceptance_gives_the_tokens_and_the_cache_of_plain_decoding(plain, lucky, device, drafts, new):
    model = drafting(V32, device, drafts=drafts)
    inputs = batch(device)
    want = plain.generate(**inputs, **ENDLESS, max_new_tokens=new)
    mask = inputs["attention_mask"]
    lucky(without_padding(want, mask), 0.7)
    output = model.generate(**inputs, **ENDLESS, max_new_tokens=new, return_dict_in_generate=True)
    assert torch.equal(output.sequences, want)
    assert all(0 < n < output.mtp.verified for n in output.mtp.accepted)
    anew = model.make_cache(3, LENGTH + new)
    mask = torch.nn.functional.pad(mask, (0, new - 1), value=1)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(want[:, :-1], attention_mask=mask, position_ids=positions, past_key_values=anew)
    assert_same_cache(output.past_key_values, anew, model)


def test_any_sequence_of_widths_gives_plain_tokens(plain, lucky, device, monkeypatch):
    inputs, widths = batch(device), itertools.cycle([1, 3, 0, 0, 2, 3, 1])
    want = plain.generate(**inputs, **ENDLESS, max_new_tokens=2 * NEW)
    lucky(without_padding(want, inputs["attention_mask"]), 0.5)
    monkeypatch.setattr(Pace, "drafts", lambda pace: next(widths))
    model = drafting(V32, device, drafts="auto")
    output = model.generate(**inputs, **ENDLESS, max_new_tokens=2 * NEW, return_dict_in_generate=True)
    assert torch.equal(output.sequences, want)
    assert all(output.mtp.steps_of)
    anew = model.make_cache(3, 64)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2 * NEW - 1), value=1)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(want[:, :-1], attention_mask=mask, position_ids=positions, past_key_values=anew)
    assert_same_cache(output.past_key_values, anew, model)


@pytest.mark.parametrize("case", [case for case in FAMILIES_WITH_MTP if case != V32])
def test_every_family_gives_plain_tokens(case, device):
    inputs = batch(device)
    want = prepared(case, device).generate(**inputs, **ENDLESS, max_new_tokens=5)
    assert torch.equal(drafting(case, device, drafts=2).generate(**inputs, **ENDLESS, max_new_tokens=5), want)


def test_a_conversation_goes_on_from_the_cache(plain, model, device):
    ids, caches = token_ids(1, LENGTH, device), [plain.make_cache(1, 64), model.make_cache(1, 64)]
    for turn in range(2):
        want, ours = (
            each.generate(ids, attention_mask=torch.ones_like(ids), **ENDLESS, max_new_tokens=5, past_key_values=cache)
            for each, cache in zip((plain, model), caches)
        )
        assert torch.equal(ours, want)
        ids = torch.cat([want, token_ids(1, 3, device, seed=turn + 5)], 1)
    assert caches[0].lengths.valid.tolist() == caches[1].lengths.valid.tolist() == [LENGTH + 5 + 3 + 4]


class Columns(BaseStreamer):
    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.ended += 1


def test_sequences_end_on_their_own_and_streams_are_the_same(plain, model, lucky, device):
    inputs = batch(device)
    free = plain.generate(**inputs, **ENDLESS, max_new_tokens=NEW)
    lucky(without_padding(free, inputs["attention_mask"]), 0.7)
    ends = [int(free[0, LENGTH + 4]), int(free[1, LENGTH + 7])]
    told = {"do_sample": False, "eos_token_id": ends, "pad_token_id": 0, "max_new_tokens": NEW}
    one, two = Columns(), Columns()
    want = plain.generate(**inputs, **told, streamer=one)
    assert torch.equal(model.generate(**inputs, **told, streamer=two), want)
    assert (two.seen, two.ended) == (one.seen, 1)


class Even(StoppingCriteria):
    """A caller's own criterion: three even tokens in a row."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -3:] % 2 == 0).all(-1)


@pytest.fixture(scope="module")
def tokenizer(pytestconfig):
    return AutoTokenizer.from_pretrained(pytestconfig.rootpath / "examples" / "tinyseek-4m")


def test_stop_strings_and_criteria_of_the_caller_end_a_sequence_inside_a_block(plain, model, lucky, device, tokenizer):
    ids = token_ids(1, LENGTH, device)
    free = plain.generate(ids, **ENDLESS, max_new_tokens=NEW)
    lucky(free, 0.9)
    six, two = (tokenizer.decode(free[0, LENGTH + start : LENGTH + 6]) for start in (0, 4))
    assert model.dsa.drafts + 1 < 6
    for told in (
        {"stop_strings": [two], "tokenizer": tokenizer},
        {"stop_strings": [six], "tokenizer": tokenizer},
        {"stopping_criteria": StoppingCriteriaList([Even()])},
        {"max_new_tokens": 6},
    ):
        told = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW} | told
        want = plain.generate(ids, **told)
        assert want.shape[1] < LENGTH + NEW
        assert torch.equal(model.generate(ids, **told), want)


PROCESSED = {
    "in the graph": {"repetition_penalty": 1.7},
    "sampling that leaves one token": {"do_sample": True, "top_k": 1, "temperature": 0.7},
    "between graphs": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
}


@pytest.mark.filterwarnings("ignore:generate drafts in two graphs")
@pytest.mark.parametrize("kind", PROCESSED)
def test_logits_are_processed_as_in_plain_decoding(plain, model, lucky, device, kind):
    inputs, told = batch(device), ENDLESS | {"max_new_tokens": NEW} | PROCESSED[kind]
    want = plain.generate(**inputs, **told)
    lucky(without_padding(want, inputs["attention_mask"]), 0.7)
    output = model.generate(**inputs, **told, return_dict_in_generate=True)
    assert torch.equal(output.sequences, want)
    assert sum(output.mtp.accepted) > 0


def test_sampled_tokens_follow_the_distribution_of_plain_sampling(monkeypatch, device):
    """All triples of tokens that top-k leaves, by how often they come, against their exact probabilities."""
    plain, model = prepared("deepseek_v3", device), drafting("deepseek_v3", device, drafts=2)
    told = {"do_sample": True, "top_k": 3, "temperature": 0.6, "eos_token_id": None, "max_new_tokens": 3}
    prompt, rows = token_ids(1, 4, device), 600
    triples, expected = prompt, torch.ones(1, device=device)
    for _ in range(3):
        with torch.no_grad():
            best = (plain(triples, use_cache=False).logits[:, -1] / told["temperature"]).topk(told["top_k"])
        triples = torch.cat([triples.repeat_interleave(3, 0), best.indices.reshape(-1, 1)], 1)
        expected = (expected[:, None] * best.values.softmax(-1)).flatten()

    def draft(model, cache, fresh, states, count, place):
        tokens = real(model, cache, fresh, states, count, place)
        likely = (triples[:, 4] == tokens[:, :1]) + 1e-6
        return torch.cat([tokens[:, :1], triples[likely.multinomial(1).squeeze(1), 5:]], 1)

    real = mtp_step.draft
    graphs = mtp_step.UNCOMPILED._replace(draft=draft)
    monkeypatch.setattr(model.dsa_guard.compiled, "graphs", lambda width, batch_size=None: graphs)
    output = model.generate(prompt.repeat(rows, 1), **told, return_dict_in_generate=True)
    found = (output.sequences[:, None] == triples).all(-1).sum(0)
    assert found.sum() == rows
    assert all(n > rows / 10 for n in output.mtp.accepted)
    degrees = len(triples) - 1
    assert ((found - rows * expected) ** 2 / (rows * expected)).sum() < degrees + 4 * (2 * degrees) ** 0.5


def test_processors_outside_the_graph_are_named(device):
    model = drafting(V32, device)
    with pytest.warns(UserWarning, match=r"drafts in two graphs a step.*: for NoRepeatNGramLogitsProcessor between"):
        model.generate(token_ids(1, 4, device), **ENDLESS, max_new_tokens=2, no_repeat_ngram_size=2)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"use_cache": False}, "use_cache=False leaves it no cache"),
        ({"return_dict_in_generate": True, "output_logits": True}, "output_logits is of single tokens"),
        ({"stopping_criteria": StoppingCriteriaList([Even()])}, "without an eos token a sequence that has stopped"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [5]}, "PrefixConstrainedLogitsProcessor must see every token"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_calls_that_cannot_draft_say_why_and_decode_plainly(plain, device, told, reason):
    model = drafting(V32, device)
    ids = token_ids(2, 5, device)
    want = plain.generate(ids, **ENDLESS, max_new_tokens=3, **told)
    with pytest.warns(UserWarning, match=f"generate decodes without drafts: {reason}"):
        ours = model.generate(ids, **ENDLESS, max_new_tokens=3, **told)
    sequences = [x if isinstance(x, torch.Tensor) else x.sequences for x in (ours, want)]
    assert torch.equal(*sequences)


def test_copies_draft_too(model, device):
    ids = token_ids(1, LENGTH, device)
    want = model.generate(ids, **ENDLESS, max_new_tokens=4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output = twin.generate(ids, **ENDLESS, max_new_tokens=4, return_dict_in_generate=True)
        assert torch.equal(output.sequences, want)
        assert output.mtp.steps > 0


def test_beams_are_decoded_plainly(plain, model, device):
    ids, told = token_ids(2, LENGTH, device), ENDLESS | {"num_beams": 2, "max_new_tokens": 4}
    assert torch.equal(model.generate(ids, **told), plain.generate(ids, **told))


def test_a_cache_without_room_for_drafts_is_refused_before_anything_is_written(model, device):
    drafts, longest = model.dsa.drafts, LENGTH + 4
    needed = longest + 2 * drafts - 1
    cache = model.make_cache(1, needed - 1)
    with pytest.raises(
        CacheCapacityError, match=rf"holds {needed - 1} tokens.*may fill {longest} and drafts.*capacity={needed}\)"
    ):
        model.generate(token_ids(1, LENGTH, device), **ENDLESS, max_new_tokens=5, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model.generate(
        token_ids(1, LENGTH, device), **ENDLESS, max_new_tokens=5, past_key_values=model.make_cache(1, needed)
    )


def test_a_cache_of_the_context_length_has_room_for_drafts_behind_it(plain, model):
    assert plain.make_cache().capacity == plain.config.max_position_embeddings
    assert model.make_cache().capacity == plain.config.max_position_embeddings + 2 * model.dsa.drafts - 1


def test_an_interrupted_call_leaves_the_cache_as_the_prompt_did(model, device, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    ids, cache = token_ids(1, LENGTH, device), model.make_cache(1, 64)
    monkeypatch.setattr(mtp_step, "rows_at", stop)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **ENDLESS, max_new_tokens=9, past_key_values=cache)
    assert (cache.lengths.valid.tolist(), cache.get_seq_length(), cache.lengths.slots) == ([LENGTH], LENGTH, None)
