"""A converted checkpoint loads in stock transformers, computes what was trained, and is written whole or not at all."""

import copy
import json
import warnings

import pytest
import torch
from cases import ATOL, TOPK, stock, token_ids
from mtp import LAYERS, add_mtp_layer, mtp_weights
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV32ForCausalLM

import dsa_compile
from dsa_compile import export
from dsa_compile.config import DSAConfig
from dsa_compile.distillation import Warmup
from dsa_compile.errors import CheckpointError, ConfigError
from dsa_compile.export import INDEXER_FILE, save_checkpoint, save_indexers
from dsa_compile.models.miniature import miniature
from dsa_compile.student import Student

YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 128,
}


def warmed_up(model, **fields):
    """A warm-up of no steps, so that selections are arbitrary: what is saved wrongly shows."""
    fields = {"indexer": "random", "index_n_heads": 4, "index_head_dim": 16, "index_topk": TOPK} | fields
    student = Student(model, DSAConfig(**fields), seed=5)
    return Warmup(
        indexers={name: tensor * 3 for name, tensor in student.weights().items()},
        plan=student.plan,
        index_topk=TOPK,
        divergences=(),
        log=(),
    )


def loaded(folder, device):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model.to(device)


def logits(model, device):
    with torch.no_grad():
        return model(token_ids(2, 3 * TOPK, device), use_cache=False).logits


@pytest.mark.parametrize("overrides", [{}, {"rope_parameters": YARN}], ids=["plain", "yarn"])
def test_deepseek_v3_becomes_deepseek_v32_whose_stock_outputs_are_ours(overrides, device, tmp_path):
    model = miniature("deepseek_v3", num_hidden_layers=2, **overrides).to(device)
    before, warmed = copy.deepcopy(model.state_dict()), warmed_up(model)
    assert save_checkpoint(model, warmed, tmp_path / "out", max_shard_size="100KB") == "deepseek_v32"
    assert len([*tmp_path.glob("out/*.safetensors")]) > 1
    again = loaded(tmp_path / "out", device)
    assert type(again) is DeepseekV32ForCausalLM
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    again.set_attn_implementation("eager")
    fields = {"indexer": warmed.indexers, "index_topk": TOPK, "lowering": "eager"}
    ours = logits(dsa_compile.optimize(copy.deepcopy(model), **fields), device)
    torch.testing.assert_close(logits(again, device), ours, atol=ATOL, rtol=0)
    assert (logits(model, device) - ours).abs().max() > 10 * ATOL


@pytest.mark.parametrize(
    ("case", "overrides", "plan"),
    [
        ("deepseek_v2", {"q_lora_rank": None}, None),
        ("deepseek_v3", {"rope_interleave": False}, None),
        ("deepseek_v3", {}, ["own", "from:0"]),
    ],
)
def test_what_has_no_sparse_class_is_saved_with_its_indexers_beside_it(case, overrides, plan, device, tmp_path):
    model = miniature(case, num_hidden_layers=2, **overrides).to(device)
    warmed = warmed_up(model, plan=plan)
    assert save_checkpoint(model, warmed, tmp_path / "out") == case
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plan=")
        again = dsa_compile.optimize(loaded(tmp_path / "out", device), plan=plan, lowering="eager")
        fields = {"indexer": tmp_path / "out" / INDEXER_FILE, "index_topk": TOPK, "plan": plan, "lowering": "eager"}
        ours = dsa_compile.optimize(copy.deepcopy(model), **fields)
    assert again.dsa.index_topk == TOPK
    state = again.state_dict()
    assert {name: True for name in state} == {n: torch.equal(t, state[n]) for n, t in ours.state_dict().items()}


def test_indexers_are_put_beside_a_dense_checkpoint(device, tmp_path):
    model = stock("deepseek_v3", device, 2)
    model.save_pretrained(tmp_path)
    weights, warmed = (tmp_path / "model.safetensors").read_bytes(), warmed_up(model)
    save_indexers(warmed, tmp_path)
    again = dsa_compile.prepare(loaded(tmp_path, device)).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in warmed.indexers.items())
    assert json.loads((tmp_path / "config.json").read_text())["index_topk"] == TOPK
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_a_model_that_brings_indexers_is_saved_with_the_trained_ones(device, tmp_path):
    model = stock("deepseek_v32", device, 2)
    warmed = warmed_up(model, indexer=None)
    assert save_checkpoint(model, warmed, tmp_path / "out") == "deepseek_v32"
    state = loaded(tmp_path / "out", device).state_dict()
    assert all(torch.equal(state[name], t) for name, t in warmed.indexers.items())
    assert not any(torch.equal(model.state_dict()[name], t) for name, t in warmed.indexers.items())


def test_tokenizer_and_mtp_layer_are_carried_over(pytestconfig, device, tmp_path, monkeypatch):
    source = pytestconfig.rootpath / "examples" / "tinyseek-4m"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"its MTP layer gets no indexer.*warmup\(\.\.\., mtp=\{\}\) trains one"):
        save_checkpoint(model, warmed_up(model, index_head_dim=32), tmp_path / "out", tokenizer=tokenizer_of(source))
    theirs, ours = (
        {n: t for f in p.glob("model-*") for n, t in load_file(f).items()} for p in (source, tmp_path / "out")
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert {name for name in ours if name not in theirs} == {name for name in ours if ".indexer." in name}
    assert (
        json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"].keys() == ours.keys()
    )
    monkeypatch.setattr(DeepseekV32ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.6\."])
    assert loaded(tmp_path / "out", device).config.num_nextn_predict_layers == 1
    assert tokenizer_of(tmp_path / "out")("The code").input_ids == tokenizer_of(source)("The code").input_ids


@pytest.mark.parametrize(("plan", "kind"), [(None, "deepseek_v32"), (["own", "from:0"], "deepseek_v3")])
def test_a_sparse_checkpoint_drafts_with_the_indexer_that_its_mtp_layer_was_given(plan, kind, device, tmp_path):
    stock("deepseek_v3", device, LAYERS).save_pretrained(tmp_path / "dense")
    add_mtp_layer(tmp_path / "dense", "deepseek_v3", device)
    warmed = warmed_up(load(tmp_path / "dense", device), plan=plan, mtp={})
    assert save_checkpoint(load(tmp_path / "dense", device), warmed, tmp_path / "sparse") == kind
    options = {"plan": plan, "index_topk": TOPK, "lowering": "eager"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plan=")
        plain, drafting = (
            dsa_compile.optimize(load(tmp_path / "sparse", device), mtp=mtp, **options) for mtp in (None, {"drafts": 2})
        )
    prefix = f"model.layers.{LAYERS}.self_attn.indexer."
    trained = {name: t for name, t in warmed.indexers.items() if name.startswith(prefix)}
    assert len(trained) == 5
    assert all(torch.equal(drafting.state_dict()[name], t) for name, t in trained.items())
    ids = token_ids(2, 2 * TOPK, device)
    want, ours = (m.generate(ids, do_sample=False, max_new_tokens=4, eos_token_id=None) for m in (plain, drafting))
    assert torch.equal(ours, want)


def test_an_indexer_of_an_mtp_layer_is_not_saved_without_the_layer(device, tmp_path):
    model = copy.deepcopy(stock("deepseek_v3", device, 1))
    warmed = warmed_up(model, mtp={"module": mtp_weights("deepseek_v3", device)})
    with pytest.raises(ConfigError, match=r"expected an MTP layer .* which the indexer of layer 1 was trained for"):
        save_checkpoint(model, warmed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def load(folder, device):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)


def tokenizer_of(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error"), KeyboardInterrupt()]
)
def test_an_interrupted_save_leaves_the_old_checkpoint(error, device, tmp_path, monkeypatch):
    model, out = stock("deepseek_v2", device, 1), tmp_path / "out"
    warmed = warmed_up(model)
    save_checkpoint(model, warmed, out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def full(tensors, path, metadata):
        save_file(tensors, path, metadata)
        raise error

    monkeypatch.setattr(export, "save_file", full)
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError
    with pytest.raises(kind, match=None if kind is KeyboardInterrupt else r"out: cannot be written .* is as before"):
        save_checkpoint(model, warmed, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_only_checkpoints_are_replaced_and_never_the_source(device, tmp_path):
    model, out = miniature("deepseek_v2", num_hidden_layers=1).to(device), tmp_path / "out"
    warmed = warmed_up(model)
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="expected a checkpoint to replace, an empty folder, or nothing"):
        save_checkpoint(model, warmed, out)
    (out / "notes.txt").unlink()
    save_checkpoint(model, warmed, out)
    with pytest.raises(ConfigError, match="another folder than the checkpoint that the model came from"):
        save_checkpoint(AutoModelForCausalLM.from_pretrained(out), warmed, out)


def test_a_source_that_cannot_be_read_is_named(device, tmp_path):
    model = copy.deepcopy(stock("deepseek_v3", device, 1))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    warmed, model.config.name_or_path = warmed_up(model), str(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as a safetensors file"):
        save_checkpoint(model, warmed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
