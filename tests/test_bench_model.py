"""``dsa-compile bench model`` without a GPU: what it runs, and what it makes of the times."""

import json

import pytest
import torch
from stopwatch import Cpu, bench

import dsa_compile
from dsa_compile.bench import model, model_sizes, model_ways, timing
from dsa_compile.bench.kernels import GROUPS, REST, by_group
from dsa_compile.models.miniature import miniature

ASKED = ("--batch", 2, "--context", 20, "--context", 30, "--prompt", 24)


class Clock(Cpu):
    def seconds(self, work):
        work()
        return 0.25


@pytest.fixture
def tiny(monkeypatch):
    def made(name, device):
        return miniature("deepseek_v32", num_hidden_layers=2)

    monkeypatch.setattr(timing, "Gpu", Clock)
    monkeypatch.setattr(model, "apart", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(model, "whole_model", made)
    monkeypatch.setattr(model, "attention_layer", made)
    monkeypatch.setattr(model_ways, "kernel_times", lambda work: (work(), {"score": 3.0, "nvjet_1": 4.0})[1])
    monkeypatch.setattr(model_ways, "optimize", dsa_compile.prepare)
    monkeypatch.setattr(model_ways, "TIMED_TOKENS", 8)
    monkeypatch.setattr(model_ways, "RUNS", 1)
    monkeypatch.setattr(model_ways.TheirsCompiled, "decode", model_ways.Theirs.decode)


def test_every_way_decodes_and_prefills(tiny, tmp_path):
    result = bench("model", *ASKED, "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    ran = {(row["way"], row["what"], row["batch"], row["tokens"]) for row in rows}
    decoded = {(way, "decode", 2, tokens) for way in model_ways.WAYS for tokens in (20, 30)}
    prompts = {
        (way, what, 1, 24) for way in ("dsa_compile", "transformers, eager") for what in ("prefill", "attention layer")
    }
    assert ran == decoded | prompts
    assert all(row["us"] > 0 and "refused" not in row for row in rows)
    assert all(row["parts"]["indexer"] == 3 for row in rows if row["way"] == "dsa_compile")


def test_what_does_not_fit_is_said_so(tiny, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model_ways.Theirs, "_step", full)
    result = bench("model", *ASKED)
    assert result.exit_code == 0
    assert result.stdout.count("out of memory") == 4


def test_steps_of_stock_transformers_are_over_a_full_cache(tiny):
    """Of the same steps one after another each sees what the first saw."""
    stock = model_ways.Theirs(model.whole_model("deepseek_v32", Clock.device), Clock(), 2, 20)
    with torch.no_grad():
        step, ids = stock._step(20)
        first, second = step(ids)[0], step(ids)[0]
    assert torch.equal(first, second)


def test_sizes_are_those_of_the_whole_models(monkeypatch):
    """DeepSeek-V3.2's config.json and GLM-5's, but for depth, experts and vocabulary."""
    monkeypatch.setattr(model_sizes, "random_model", lambda classes, sizes, device: (classes, sizes))
    _, v32 = model_sizes.whole_model("deepseek_v32", Clock.device)
    assert (v32["hidden_size"], v32["num_attention_heads"], v32["intermediate_size"]) == (7168, 128, 18432)
    assert (v32["num_hidden_layers"], v32["first_k_dense_replace"], v32["n_routed_experts"]) == (4, 3, 32)
    _, glm = model_sizes.whole_model("glm_moe_dsa", Clock.device)
    assert (glm["hidden_size"], glm["num_attention_heads"], glm["intermediate_size"]) == (6144, 64, 12288)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("triton_tem_fused_sparse_mla_4", "attention"),
        ("score", "indexer"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "projections"),
        ("void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape", "experts"),
        ("triton_red_fused_add_mul_3", REST),
        ("void at::native::vectorized_gather_kernel<16, long>", REST),
    ],
)
def test_kernels_are_told_apart_by_name(kernel, group):
    assert by_group({kernel: 2.0}) == dict.fromkeys([*GROUPS, REST], 0.0) | {group: 2.0}


def test_a_page_shows_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    shared = {"model": "deepseek_v32", "what": "decode", "batch": 1, "tokens": 8192}
    parts = dict.fromkeys([*GROUPS, REST], 20.0)
    rows = [
        {**shared, "way": "dsa_compile", "us": 1500.0, "generate_us": 1600.0, "graph_bytes": 3 << 20, "parts": parts},
        {**shared, "way": "transformers, eager", "us": 6000.0},
        {**shared, "way": "transformers, compiled", "refused": "out of memory"},
    ]
    figures = {"title": "4 layers", "device": "a GPU", "torch": "2.11", "rows": rows}
    (tmp_path / "model.json").write_text(json.dumps(figures))
    result = bench("page", tmp_path / "model.json", "--out", tmp_path / "performance.md")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "performance.md").read_text()
    assert "| 1 | 8,192 | 1.500 | 6.000 4.00x | out of memory | 1.60 | 3.00 |" in text
    assert "(performance.png)" in text
    assert (tmp_path / "performance.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_of_something_else_is_refused(tmp_path):
    (tmp_path / "model.json").write_text("[]")
    result = bench("page", tmp_path / "model.json", "--out", tmp_path / "performance.md")
    assert result.exit_code == 2
    assert "expected a file that 'dsa-compile bench model --out' wrote" in " ".join(result.output.split())


def test_an_unknown_model_is_named(tiny):
    result = bench("model", *ASKED, "--model", "deepseek_v23")
    assert result.exit_code == 2
    assert "did you mean 'deepseek_v32'?" in " ".join(result.output.split())
