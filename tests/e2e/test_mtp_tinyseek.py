"""A trained MTP layer: plain tokens, and as many accepted drafts as transformers' own drafting has."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM

import dsa_compile
from dsa_compile.needles import make_needles

NEW = 8
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def checkpoint(pytestconfig):
    return pytestconfig.rootpath / "examples" / "tinyseek-4m"


def prompts(checkpoint, device, rows=3):
    """Prompts of different lengths, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    needles = make_needles(rows, 150, count=lambda text: len(tokenizer(text).input_ids))
    texts = [tokenizer.bos_token + n.prompt for n in needles]
    return tokenizer(texts, padding=True, return_tensors="pt").to(device)


@pytest.fixture(scope="module")
def batch(checkpoint, device):
    return prompts(checkpoint, device)


def load(checkpoint, device):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device)


@pytest.fixture(scope="module")
def want(checkpoint, batch, device):
    return dsa_compile.prepare(load(checkpoint, device), selector="dense").generate(**batch, **GREEDY)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_tokens_are_those_of_plain_decoding(checkpoint, batch, want, device, drafts):
    model = dsa_compile.prepare(load(checkpoint, device), selector="dense", mtp={"drafts": drafts})
    assert torch.equal(model.generate(**batch, **GREEDY), want)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 8])
def test_other_batches_too(checkpoint, device, rows, drafts):
    batch, mtp = prompts(checkpoint, device, rows), {"drafts": drafts}
    plain, model = (dsa_compile.prepare(load(checkpoint, device), selector="dense", mtp=m) for m in (None, mtp))
    assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))


def test_it_takes_as_few_steps_as_transformers_own_drafting(checkpoint, batch, want, device, monkeypatch):
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.6.*"])
    model = dsa_compile.prepare(load(checkpoint, device), selector="dense", mtp={"drafts": 1})
    stock, calls = load(checkpoint, device), []
    stock.model.register_forward_hook(lambda *_: calls.append(1))
    for row, mask in zip(batch.input_ids[:2], batch.attention_mask.bool()):
        ids = row[mask][None]
        calls.clear()
        theirs = stock.generate(ids, **GREEDY, use_mtp=True)
        ours = model.generate(ids, **GREEDY, return_dict_in_generate=True)
        assert torch.equal(ours.sequences, theirs)
        assert ours.mtp.steps == len(calls) - 1 < NEW - 1


@pytest.mark.slow
def test_compiled_it_drafts_as_it_decodes(checkpoint, batch, want, device):
    model = dsa_compile.optimize(load(checkpoint, device), selector="dense", mtp={"drafts": 2})
    assert torch.equal(model.generate(**batch, **GREEDY), want)
