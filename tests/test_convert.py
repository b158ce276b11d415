"""From a dense checkpoint to a sparse one, from a shell."""

import json

import pytest
import torch
from cases import TOPK
from mtp import add_mtp_layer
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV32ForCausalLM
from typer.testing import CliRunner

import dsa_compile.convert
from dsa_compile.cli import app
from dsa_compile.models.miniature import miniature

LENGTH = 3 * TOPK
SIZES = ("--index-topk", TOPK, "--index-heads", 2, "--index-head-dim", 16, "--tokens", LENGTH, "--batch", 2)


@pytest.fixture(scope="module")
def checkpoint(pytestconfig, tmp_path_factory):
    """A miniature of one layer and an MTP layer with a real tokenizer, and text."""
    folder = tmp_path_factory.mktemp("dense")
    miniature("deepseek_v3", num_hidden_layers=1, vocab_size=4096).save_pretrained(folder / "model")
    add_mtp_layer(folder / "model", "deepseek_v3", torch.device("cpu"))
    AutoTokenizer.from_pretrained(pytestconfig.rootpath / "examples" / "tinyseek-4m").save_pretrained(folder / "model")
    readme = (pytestconfig.rootpath / "README.md").read_text()
    (folder / "text.txt").write_text("<|endoftext|>".join(readme.split("\n## ")))
    (folder / "short.txt").write_text("few words")
    return folder


def convert(checkpoint, out, *arguments, data="text.txt"):
    given = ("convert", checkpoint / "model", "--data", checkpoint / data, "--out", out, *SIZES, *arguments)
    return CliRunner().invoke(app, [str(a) for a in given])


def test_convert_writes_a_sparse_checkpoint_and_says_what_it_costs(checkpoint, tmp_path):
    done = convert(checkpoint, tmp_path / "sparse", "--indexer", "random", "--steps", 2, "--sparse-steps", 1)
    assert done.exit_code == 0, done.output
    for text in (
        "plan F, K = 8",
        "│     1 │ MTP │",
        "exact selection",
        "over dense",
        "2 rows that no indexer was trained on",
    ):
        assert text in done.stdout
    assert done.stdout.rstrip().endswith("sparse: deepseek_v32")
    assert [p.name for p in tmp_path.iterdir()] == ["sparse"]
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")) is DeepseekV32ForCausalLM
    index = json.loads((tmp_path / "sparse" / "model.safetensors.index.json").read_text())
    assert "model.layers.1.self_attn.indexer.wq_b.weight" in index["weight_map"]
    assert AutoTokenizer.from_pretrained(tmp_path / "sparse").eos_token == "<|endoftext|>"


def test_a_conversion_that_is_killed_goes_on_where_it_was(checkpoint, tmp_path, monkeypatch):
    saved, seen = dsa_compile.convert.save_checkpoint, []

    def killed(model, warmed, out, tokenizer):
        seen.append(warmed)
        if len(seen) == 1:
            raise KeyboardInterrupt
        return saved(model, warmed, out, tokenizer=tokenizer)

    monkeypatch.setattr(dsa_compile.convert, "save_checkpoint", killed)
    arguments = ("--steps", 2, "--isolate", "--held-out", 1, "--no-mtp")
    assert convert(checkpoint, tmp_path / "sparse", *arguments).exit_code != 0
    assert [p.name for p in tmp_path.iterdir()] == [".sparse.warmup"]
    with pytest.warns(UserWarning, match="its MTP layer gets no indexer"):
        assert convert(checkpoint, tmp_path / "sparse", *arguments).exit_code == 0
    first, second = seen
    assert all(torch.equal(t, second.indexers[name]) for name, t in first.indexers.items())
    assert second.log == first.log[: len(second.log)]


def test_a_model_that_learned_too_is_what_is_written(checkpoint, tmp_path):
    joint = ("--sparse-steps", 1, "--train-all", "--sparse-lr", 1e-2)
    with pytest.warns(UserWarning, match="its MTP layer gets no indexer"):
        done = convert(checkpoint, tmp_path / "sparse", "--no-mtp", "--steps", 1, *joint)
    assert done.exit_code == 0, done.output
    dense, sparse = (AutoModelForCausalLM.from_pretrained(p) for p in (checkpoint / "model", tmp_path / "sparse"))
    assert type(sparse) is DeepseekV32ForCausalLM
    assert not torch.equal(dense.lm_head.weight, sparse.lm_head.weight)


@pytest.mark.parametrize(
    ("arguments", "data", "text"),
    [
        ((), "short.txt", "expected at least one row of 24 tokens"),
        (("--tokens", TOPK), "text.txt", "nothing would be sparse"),
        (("--plan", "last"), "text.txt", "plan: unknown 'last'"),
        (("--layer0", "dense"), "text.txt", "layer0='dense' is for plans with 'mli'"),
        (("--steps", 0), "text.txt", "steps: expected more than 0, came 0"),
        (("--held-out", 10**6), "text.txt", "held_out: expected fewer than the"),
        (("--held-out", 0), "text.txt", "held_out: expected more than 0"),
        (("--indexer", "elsewhere"), "text.txt", "Give retrain=True"),
        (("--sparse-steps", -1), "text.txt", "sparse_steps: expected at least 0"),
        (("--sparse-lr", 0), "text.txt", "sparse_learning_rate: expected more than 0"),
        (("--temperature", 0.5), "text.txt", "temperature: expected at least 1 and finite, came 0.5"),
        (("--train-all",), "text.txt", "train_all: expected the second stage"),
        (("--train-all", "--sparse-steps", 1, "--dtype", "float16"), "text.txt", "came torch.float16. Load the model"),
        ((), "missing.txt", "missing.txt: cannot be read as text"),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_exit_code_2(arguments, data, text, checkpoint, tmp_path):
    done = convert(checkpoint, tmp_path / "sparse", *arguments, data=data)
    assert done.exit_code == 2
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "sparse").exists()


def test_a_checkpoint_is_not_written_over_itself(checkpoint):
    done = convert(checkpoint, checkpoint / "model")
    assert (done.exit_code, "another folder than the checkpoint" in done.stderr) == (2, True)
    assert convert(checkpoint, checkpoint).exit_code == 2


def test_several_processes_are_told_what_to_call(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = convert(checkpoint, tmp_path / "sparse")
    assert (done.exit_code, "Call dsa_compile.warmup in each" in done.stderr) == (2, True)


def test_without_accelerate_it_says_how_to_get_it(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(dsa_compile.convert, "find_spec", lambda name: None)
    done = convert(checkpoint, tmp_path / "sparse")
    assert (done.exit_code, "pip install 'dsa_compile[train]'" in done.stderr) == (2, True)
