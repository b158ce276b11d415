"""Processed distributions equal transformers' own, one row at a time and in a compiled graph."""

import inspect
import re

import pytest
import torch
from cases import stock
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

import dsa_compile.lowering  # noqa: F401 (registers the ops)
from dsa_compile.errors import ConfigError, InputError
from dsa_compile.sampling import ABSENT, ABSENT_FROM_SAMPLING, Sampling

VOCAB = 128
ASKS = {
    "no_repeat_ngram_size": 2,
    "sequence_bias": [[[5], -1.0]],
    "encoder_repetition_penalty": 1.5,
    "bad_words_ids": [[5]],
    "min_length": 3,
    "min_new_tokens": 2,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (1, 1.1),
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "top_h": 0.4,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
}
CONFIGS = (
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
)


@pytest.fixture
def rows(device):
    """Logits [3, 2, vocab] with ties, and histories of which the two rows have different lengths behind them."""
    logits = (torch.randn(3, 2, VOCAB, device=device) * 3).round(decimals=1)
    return logits, torch.randint(VOCAB, (3, 9), device=device), torch.tensor([[4, 5], [7, 8], [8, 9]], device=device)


def processors(config, device, prompt=4):
    """Those that transformers makes of a GenerationConfig."""
    model = stock("deepseek_v3", device)
    model._prepare_special_tokens(config, True, device=device)
    return model._get_logits_processor(
        config, prompt, encoder_input_ids=torch.ones(1, prompt, dtype=torch.long, device=device), device=device
    )


def theirs(config, logits, history, lengths):
    """[B, T, vocab] of transformers' processors, called once for each row."""
    made, out = processors(config, logits.device), torch.empty_like(logits)
    for b, t in torch.cartesian_prod(torch.arange(len(logits)), torch.arange(logits.shape[1])).tolist():
        out[b, t] = made(history[b : b + 1, : lengths[b, t]], logits[b, t][None])[0]
    return out


@pytest.mark.parametrize("fields", CONFIGS, ids=str)
def test_equal_to_transformers(rows, fields):
    config = GenerationConfig(do_sample=True, eos_token_id=2, **fields)
    want = theirs(config, *rows).softmax(-1)
    ours = Sampling.of(config).target(*rows)
    assert torch.equal(ours == 0, want == 0)
    torch.testing.assert_close(ours, want, atol=1e-7, rtol=1e-6)


def test_top_p_keeps_no_token_beyond_the_one_that_reaches_it(rows):
    flat = torch.zeros_like(rows[0])
    config = GenerationConfig(do_sample=True, top_p=0.75, eos_token_id=2)
    for kept in (Sampling.of(config).target(flat), theirs(config, flat, *rows[1:]).softmax(-1)):
        assert ((kept > 0).sum(-1) == 0.75 * VOCAB).all()


def test_greedy_logits_are_penalised_and_nothing_else(rows):
    config = GenerationConfig(do_sample=False, repetition_penalty=1.3, temperature=0.5, top_k=3)
    sampling = Sampling.of(config)
    assert sampling == Sampling(greedy=True, repetition_penalty=1.3)
    torch.testing.assert_close(sampling.target(*rows), theirs(config, *rows), atol=1e-6, rtol=1e-6)


def test_every_sequence_may_have_numbers_of_its_own(rows):
    columns = {
        "temperature": [0.5, 1.0, 2.0],
        "top_k": [0, 3, 500],
        "top_p": [1.0, 0.5, 0.9],
        "min_p": [0.1, 0.0, 0.02],
        "repetition_penalty": [1.0, 1.5, 0.7],
    }
    ours = Sampling(**{k: torch.tensor(v, device=rows[0].device) for k, v in columns.items()}).target(*rows)
    for b in range(3):
        alone = Sampling(**{k: v[b] for k, v in columns.items()}).target(*(x[b : b + 1] for x in rows))
        assert torch.equal(ours[b : b + 1] == 0, alone == 0)
        torch.testing.assert_close(ours[b : b + 1], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_one_graph_holds_histories_of_any_length(rows, kind):
    values = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2}
    if kind == "tensors":
        values = {k: torch.full((3,), v, device=rows[0].device) for k, v in values.items()}
    sampling = Sampling(**values)

    def step(logits, history, lengths, uniforms):
        probs = sampling.target(logits, history, lengths)
        return torch.ops.dsa.mtp_verify(probs, history[:, -1:], None, uniforms, False)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    logits, history, lengths = rows
    for tokens in range(3):
        history, lengths = history[:, tokens:].contiguous(), lengths - tokens
        torch._dynamo.mark_dynamic(history, 1)
        inputs = logits, history, lengths, torch.rand(3, 2, device=logits.device)
        assert all(map(torch.equal, compiled(*inputs), step(*inputs)))
    assert counter.frame_count == 1


def test_16_bit_logits_are_processed_in_float32(rows):
    logits, sampling = rows[0], Sampling(temperature=0.7, top_p=0.8)
    assert torch.equal(sampling.target(logits.bfloat16()), sampling.target(logits.bfloat16().float()))
    assert sampling.target(logits.double()).dtype == torch.float64


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("name", ASKS)
def test_what_else_transformers_would_do_is_named(device, name, do_sample):
    config = GenerationConfig(do_sample=do_sample, eos_token_id=2, **{name: ASKS[name]})
    assert len(processors(config, device)) == len(Sampling.unsupported(config))
    if Sampling.unsupported(config):
        with pytest.raises(ConfigError, match=f"without {name}.*between two graphs"):
            Sampling.of(config)


def test_no_field_that_makes_a_processor_is_overlooked():
    read = set(re.findall(r"generation_config\.([a-z]\w*)", inspect.getsource(GenerationMixin._get_logits_processor)))
    ours = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    no_change_of_the_distribution = {"renormalize_logits", "max_length", "use_cache"}
    assert read == ours | no_change_of_the_distribution | {*ABSENT} | {*ABSENT_FROM_SAMPLING}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": 0.0}, "Sampling.temperature: expected a number above 0, came 0.0"),
        ({"repetition_penalty": -1.0}, "Sampling.repetition_penalty: expected a number above 0, came -1.0"),
        ({"top_p": 1.1}, "Sampling.top_p: expected a number from 0 to 1, came 1.1"),
        ({"min_p": float("nan")}, "Sampling.min_p: expected a number from 0 to 1, came nan"),
        ({"top_k": -1}, "Sampling.top_k: expected a whole number of at least 0, came -1"),
        ({"top_k": 2.5}, "Sampling.top_k: expected a whole number of at least 0, came 2.5"),
    ],
)
def test_numbers_outside_their_range_are_refused(fields, text):
    with pytest.raises(ConfigError, match=text):
        Sampling(**fields)


def test_a_penalty_needs_the_history(rows):
    with pytest.raises(InputError, match="expected history and lengths for repetition_penalty, came None"):
        Sampling(repetition_penalty=1.1).target(rows[0])
