"""The cost model at a shell: tables, a picture, and an answer to what fits."""

import json

import pytest
from transformers import AutoConfig, DeepseekV32Config
from typer.testing import CliRunner

from dsa_compile import cost_picture, curve
from dsa_compile.cli import app
from dsa_compile.cost.speculation import DEEPSEEK_V32
from dsa_compile.cost_tables import CostTables
from dsa_compile.errors import ConfigError, UnsupportedModelError
from dsa_compile.models.miniature import miniature
from dsa_compile.served import served

V32 = CostTables(
    name="V3.2", model=DEEPSEEK_V32, gpu="h800", index_topk=2048, contexts=(1024, 4096, 131_072), batches=(16, 64)
)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder that holds a config and no weights."""
    miniature("deepseek_v32").config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("context", "share"), [(2048, 0), (4096, 18.6), (16384, 47.8), (32768, 64.7), (131_072, 88.0)])
def test_share_of_an_indexer_in_what_is_read(context, share):
    assert round(V32.indexer_share(context) * 100, 1) == share


def test_up_to_k_sparse_is_dense():
    for pair in (V32.decode(2048), V32.prompt(2048)):
        assert pair[0] == pair[1]
    for pair in (V32.decode(2049), V32.prompt(2049)):
        assert pair[0] != pair[1]


def test_sizes_come_from_a_config():
    assert served(DeepseekV32Config()) == DEEPSEEK_V32
    lite = miniature("deepseek_v2", q_lora_rank=None).config
    found = served(lite)
    assert (found.attention.indexer.n_heads, found.attention.indexer.head_dim) == (64, 128)
    assert found.attention_weights == 64 * 4 * 24 + 64 * 40 + 32 * 4 * 32 + 4 * 16 * 64
    with pytest.raises(UnsupportedModelError, match=r"model_type is one of deepseek_v2, .*, came 'llama'"):
        served(AutoConfig.for_model("llama"))


def test_attention_weights_are_those_of_the_class():
    model = miniature("deepseek_v32")
    layer = model.model.layers[0].self_attn
    counted = sum(p.numel() for n, p in layer.named_parameters() if "proj" in n and "indexer" not in n)
    assert served(model.config).attention_weights == counted
    assert served(model.config).expert_weights == sum(
        p[0].numel() for p in model.model.layers[2].mlp.experts.parameters()
    )


def test_plan_cost_prints_the_tables():
    result = run("plan", "cost", "--gpu", "h800", "--context", 4096, "--context", 131072, "--batch", 16)
    assert result.exit_code == 0, result.output
    for cell in ("36.51 -> 2.72", "13.43x", "144.00 -> 160.50", "0.36x", "18.6%", "8.33x", "164.3"):
        assert cell in result.stdout
    assert "sparse pays: 2,176 in decode FLOPs, 2,314 in bytes read, 16,315 in prompt" in result.stdout


def test_plan_cost_of_a_config(folder):
    result = run("plan", "cost", "--model", folder, "--context", 64)
    assert result.exit_code == 0, result.output
    assert f"{folder.name}: one layer, dense -> sparse with K = 8" in result.stdout


def test_drafts_that_never_pay_say_so():
    rows = [line for line in run("plan", "cost", "--batch", 64, "--context", 4096).stdout.splitlines() if "64" in line]
    assert sum("never" in row for row in rows) == 2


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert run("plan", "cost", "--png", tmp_path / "cost.png").exit_code == 0
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(curve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"cost.png: expected matplotlib .* pip install 'dsa_compile\[plot\]'"):
        cost_picture.draw(V32, tmp_path / "cost.png")


def test_fits_says_what_does(folder):
    # 3 layers of 32 + 8 latent values and 16 of an index key, in bfloat16
    result = run("plan", "fits", "--model", folder, "--context", 100, "--batch", 2)
    assert result.exit_code == 0, result.output
    assert "336 B" in result.stdout
    words = dict(line.strip("│ ").rsplit("│", 1) for line in result.stdout.splitlines() if line.count("│") == 3)
    found = {name.strip(): value.strip() for name, value in words.items()}
    parameters = sum(p.numel() for p in miniature("deepseek_v32").parameters())
    prompt = 200 * 2 * (6 * 64 + 4 * (16 + 8 + 40 + 32 + 16))
    tokens = int((141e9 * 0.9 - 2 * parameters - prompt) // 336)
    assert found["fits"] == "yes"
    assert found["sequences of 100 tokens that fit"] == f"{tokens // 100:,}"
    assert found["tokens of a sequence that fit, 2 at once"] == f"{tokens // 2:,}"


def test_a_plan_and_fp8_make_room_and_what_does_not_fit_exits_with_1(folder):
    shared = run("plan", "fits", "--model", folder, "--context", 100, "--plan", "share:FSS")
    assert "272 B" in shared.stdout
    late = run("plan", "fits", "--model", folder, "--context", 100, "--plan", "share:FSS", "--layer0", "dense")
    assert "layer0='dense' is for plans with 'mli'" in late.stderr
    wide = json.loads((folder / "config.json").read_text()) | {"kv_lora_rank": 128}
    (folder / "config.json").write_text(json.dumps(wide))
    small = run("plan", "fits", "--model", folder, "--context", 100, "--cache-dtype", "fp8", "--index-dtype", "fp8")
    assert f"{3 * (128 + 4 + 16 + 16 + 4)} B" in small.stdout
    full = run("plan", "fits", "--model", folder, "--context", 10**9, "--weights", "fp8", "--gpus", 2)
    assert full.exit_code == 1
    assert "no" in full.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("cost", "--gpu", "h2000"), "gpu: unknown name 'h2000'; did you mean 'h200'?"),
        (("cost", "--index-topk", "0"), "index_topk: expected a whole number of at least 1, came 0"),
        (("cost", "--png", "no/such/folder.png"), "--png: expected a file"),
        (("cost", "--model", "no/such"), "expected a checkpoint folder, found none"),
        (("fits", "--model", "{folder}", "--context", "9", "--weights", "int4"), "--weights: expected bfloat16 or fp8"),
        (("fits", "--model", "{folder}", "--context", "9", "--gpu", "tpu"), "gpu: unknown name 'tpu'"),
        (("fits", "--model", "{folder}", "--context", "9", "--cache-dtype", "int4"), "CacheConfig.dtype: expected"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(arguments, text, folder):
    result = run("plan", *(a.format(folder=folder) for a in arguments))
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
