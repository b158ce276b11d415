"""How a prompt attends changes how fast it is and, but for ``"dense"``, nothing else."""

import pytest
import torch
from cases import left_padded, token_ids
from torch._dynamo.utils import counters

import dsa_compile
from dsa_compile.errors import ConfigError
from dsa_compile.lowering.prefill_mla import launch, reference
from dsa_compile.models.miniature import miniature

TOPK, LENGTH = 16, 40
FP8 = {"dtype": "fp8", "index_dtype": "fp8"}


def made(device, **fields):
    torch.manual_seed(0)
    model = miniature("deepseek_v32", num_hidden_layers=2, first_k_dense_replace=2).to(device)
    return dsa_compile.optimize(model, **{"lowering": "eager", "index_topk": TOPK, **fields})


def logits(model, inputs, pieces=(30, 33, LENGTH)):
    """Of a prompt in pieces, whose context passes K, and of one token behind it."""
    cache, outputs, start = model.make_cache(2, 64), [], 0
    with torch.no_grad():
        for stop in pieces:
            part = {name: x[:, start:stop] for name, x in inputs.items()} | {
                "attention_mask": inputs["attention_mask"][:, :stop]
            }
            outputs.append(model(**part, past_key_values=cache).logits)
            start = stop
        outputs.append(model(inputs["input_ids"][:, :1], past_key_values=cache).logits)
    return torch.cat(outputs, 1)


def prompt(device):
    return {"input_ids": token_ids(2, LENGTH, device), **left_padded(2, LENGTH, device)}


@pytest.fixture
def forms(monkeypatch):
    """Which form each attention ran in."""
    seen = []

    def watch(*args):
        seen.append(reference_choice(*args))
        return seen[-1]

    reference_choice = reference.is_masked
    monkeypatch.setattr(reference, "is_masked", watch)
    monkeypatch.setattr(launch, "is_masked", watch)
    return seen


@pytest.mark.parametrize(
    ("prefill", "cache"),
    [
        ("auto", FP8),
        ("masked", {}),
        pytest.param("auto", {}, marks=pytest.mark.slow),
        pytest.param("masked", FP8, marks=pytest.mark.slow),
    ],
    ids=["auto-fp8", "masked-values", "auto-values", "masked-fp8"],
)
def test_masked_equals_sparse(device, prefill, cache, forms):
    want = logits(made(device, prefill="sparse", cache=cache), prompt(device))
    assert forms == []
    ours = logits(made(device, prefill=prefill, cache=cache), prompt(device))
    assert any(forms)
    real = prompt(device)["attention_mask"].bool()
    torch.testing.assert_close(ours[:, :LENGTH][real], want[:, :LENGTH][real], atol=2e-5, rtol=0)
    torch.testing.assert_close(ours[:, LENGTH:], want[:, LENGTH:], atol=2e-5, rtol=0)


def test_dense_prompts_attend_to_everything_and_steps_select(device, forms):
    model, dense = made(device, prefill="dense"), made(device, selector="dense")
    inputs = prompt(device)
    ours, theirs = logits(model, inputs), logits(dense, inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[:, :LENGTH][real], theirs[:, :LENGTH][real], atol=2e-5, rtol=0)
    assert (ours[:, LENGTH:] - theirs[:, LENGTH:]).abs().max() > 1e-3
    assert forms == []


def test_one_graph_chooses_for_all_lengths(device, forms):
    """The first piece is masked, the one behind it sparse; neither compiles anything anew."""
    model, inputs = made(device), prompt(device)
    counters.clear()
    logits(model, inputs, pieces=(30, LENGTH))
    logits(model, inputs, pieces=(LENGTH,))
    assert counters["stats"]["unique_graphs"] == 2, "prompts and steps"
    assert {True, False} == set(forms)


def test_a_prompt_reads_a_pool_as_far_as_it_is_filled(device, monkeypatch):
    """Slots behind hold NaN, and what is read has as many slots as tokens so far, and less than a step more."""
    model, seen = made(device), []
    monkeypatch.setattr(reference, "is_masked", lambda dims, q, latent, *rest: seen.append(latent.shape[1]) or True)
    monkeypatch.setattr(launch, "is_masked", reference.is_masked)
    cache = model.make_cache(2, 64)
    for layer in cache.layers:
        layer.latent.fill_(float("nan"))
    with torch.no_grad():
        for start, stop in ((0, 20), (20, LENGTH)):
            assert model(token_ids(2, LENGTH, device)[:, start:stop], past_key_values=cache).logits.isfinite().all()
    assert seen == [32, 32, 48, 48]
    assert cache.lengths.reach is None


def test_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match=r"prefill: expected one of 'auto', 'dense', 'masked', 'sparse', came 'mask'"):
        dsa_compile.DSAConfig(prefill="mask")
