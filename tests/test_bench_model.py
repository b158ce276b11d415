"""``dsa-compile bench model`` without a GPU: what it runs, and what it makes of the times."""

import json
import os
import signal
import time

import pytest
import torch
from stopwatch import Cpu, bench

import dsa_compile
from dsa_compile.bench import model, model_sizes, model_ways, plan_slice, timing
from dsa_compile.bench.apart import turn, within
from dsa_compile.bench.floor import floor_us, weight_bytes
from dsa_compile.bench.kernels import GROUPS, REST, by_group
from dsa_compile.models.miniature import miniature

V32, OURS, STOCK = "deepseek_v32", "dsa_compile", "transformers, eager"
ASKED = ("--batch", 2, "--context", 20, "--context", 30, "--prompt", 24)


def in_turn(seconds, function, calls):
    return [function(*arguments) for arguments in calls]


class Clock(Cpu):
    def seconds(self, work):
        work()
        return 0.25


@pytest.fixture
def tiny(monkeypatch):
    def made(name, device):
        return miniature("deepseek_v32", num_hidden_layers=2)

    monkeypatch.setattr(timing, "Gpu", Clock)
    monkeypatch.setattr(model, "within", in_turn)
    monkeypatch.setattr(model, "whole_model", made)
    monkeypatch.setattr(model, "attention_layer", made)
    monkeypatch.setattr(model_ways, "kernel_times", lambda work: (work(), {"score": 3.0, "nvjet_1": 4.0})[1])
    monkeypatch.setattr(model_ways, "optimize", dsa_compile.prepare)
    monkeypatch.setattr(model_ways, "TIMED_TOKENS", 8)
    monkeypatch.setattr(model_ways, "RUNS", 1)
    monkeypatch.setattr(model_ways.TheirsCompiled, "decode", model_ways.Theirs.decode)


def run(*arguments):
    result = bench("model", *ASKED, *arguments)
    assert result.exit_code == 0, result.output
    return result


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_every_way_decodes_and_prefills(tiny, tmp_path):
    run("--out", tmp_path / "figures.json")
    rows = rows_of(tmp_path / "figures.json")
    ran = {(row["model"], row["way"], row["what"], row["batch"], row["tokens"]) for row in rows}
    decoded = {(V32, way, "decode", 2, tokens) for way in model_ways.WAYS for tokens in (20, 30)}
    ranks = {(f"{V32}_rank", OURS, "decode", 8, tokens) for tokens in (20, 30)}
    prompts = {(V32, way, what, 1, 24) for way in (OURS, STOCK) for what in ("prefill", "attention layer")}
    assert ran == decoded | ranks | prompts
    assert all(row["us"] > 0 and row["peak_bytes"] and "refused" not in row for row in rows)
    assert all(row["parts"]["indexer"] == 3 for row in rows if row["way"] == OURS)


def test_ours_come_first_and_compile_side_by_side(tiny, monkeypatch):
    groups = []
    monkeypatch.setattr(model, "within", lambda seconds, function, calls: groups.append([c[0] for c in calls]) or [0])
    run("--at-once", 3)
    assert [len(group) for group in groups] == [3, 1, 1, 1, 1, 1]
    assert [group[0].way for group in groups[:2]] == [OURS, OURS]
    assert all(job.way != OURS for group in groups[2:] for job in group)


def test_a_second_run_fills_what_the_first_left(tiny, monkeypatch, tmp_path):
    out, asked = tmp_path / "figures.json", []
    run("--out", out, "--way", OURS)
    first = rows_of(out)
    out.write_text(json.dumps(json.loads(out.read_text()) | {"rows": first[1:]}))
    monkeypatch.setattr(model, "within", lambda *rest: asked.extend(c[0] for c in rest[2]) or in_turn(*rest))
    run("--out", out, "--way", OURS, "--way", STOCK)
    assert {(job.way, job.what, job.tokens) for job in asked} == {
        (OURS, "decode", (20,)),
        (STOCK, "decode", (20, 30)),
        (STOCK, "prefill", (24,)),
        (STOCK, "attention layer", (24,)),
    }
    assert rows_of(out)[: len(first) - 1] == first[1:]
    assert len(rows_of(out)) == len(first) + 4


def test_tables_are_measured_apart(tiny, tmp_path):
    run("--out", tmp_path / "figures.json", "--way", OURS, "--kind", "prefill")
    assert [(row["what"], row["tokens"]) for row in rows_of(tmp_path / "figures.json")] == [("prefill", 24)]
    run("--out", tmp_path / "figures.json", "--way", OURS, "--kind", "decode", "--model", "deepseek_v32_rank")
    assert [row["what"] for row in rows_of(tmp_path / "figures.json")] == ["prefill", "decode", "decode"]


def test_nothing_starts_when_the_time_is_over(tiny, tmp_path):
    run("--out", tmp_path / "figures.json", "--seconds", 0)
    assert rows_of(tmp_path / "figures.json") == []


@pytest.mark.parametrize("text", ["[]", '{"rows": [{}]}', '{"device": "another", "torch": "2.11", "rows": []}'])
def test_rows_of_something_else_are_not_added_to(tiny, tmp_path, text):
    (tmp_path / "figures.json").write_text(text)
    result = bench("model", *ASKED, "--out", tmp_path / "figures.json")
    assert result.exit_code == 2
    assert "--out: expected rows of" in " ".join(result.output.split())
    assert (tmp_path / "figures.json").read_text() == text


def test_what_does_not_fit_is_said_so(tiny, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model_ways.Theirs, "_step", full)
    monkeypatch.setattr(model_ways.Ours, "compile", full)
    assert run().stdout.count("out of memory") == 2 * 2 + 2 + 2 + 2


def test_what_stock_transformers_cannot_run_is_said_and_what_ours_cannot_is_a_failure(tiny, monkeypatch, tmp_path):
    def broken(*args):
        raise RuntimeError("no such graph\nat line 3")

    with monkeypatch.context() as patch:
        patch.setattr(model_ways.Theirs, "_step", broken)
        run("--out", tmp_path / "figures.json")
    refused = [(row["what"], row["refused"]) for row in rows_of(tmp_path / "figures.json") if "refused" in row]
    assert refused == [("decode", "no such graph")] * 4
    monkeypatch.setattr(model, "within", lambda seconds, function, calls: [1] * len(calls))
    result = bench("model", *ASKED, "--way", OURS)
    assert result.exit_code == 1


def sleeping(seconds):
    with turn():
        pass
    time.sleep(seconds)
    if seconds == 0:
        raise ValueError


@pytest.mark.slow
def test_what_takes_too_long_is_ended():
    start = time.monotonic()
    assert within(30, sleeping, [(0,), (0.1,), (600,)]) == [1, 0, None]
    assert time.monotonic() - start < 60


def killed(first):
    if first:
        os.kill(os.getpid(), signal.SIGKILL)
    with turn():
        pass


@pytest.mark.slow
def test_where_one_is_killed_nobody_waits_for_it():
    assert within(None, killed, [(True,), (False,)]) == [-signal.SIGKILL, None]


def test_a_floor_is_of_weights_read_once_and_of_kernels():
    """Of experts a step of many sequences reads all; of one token, those that it draws."""
    stock = miniature(V32, num_hidden_layers=2)
    experts = sum(p.nbytes for n, p in stock.named_parameters() if ".experts." in n)
    rest = sum(p.nbytes for n, p in stock.named_parameters() if ".experts." not in n and "embed_tokens" not in n)
    drawn = stock.config.num_experts_per_tok / stock.config.n_routed_experts
    assert experts > 0
    assert weight_bytes(stock, 1) == pytest.approx(rest + drawn * experts)
    assert weight_bytes(stock, 1000) == pytest.approx(rest + experts)
    assert floor_us(43e6, 4300, {"attention": 3, "indexer": 4, "experts": 50}) == pytest.approx(10 + 3 + 4)


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


def test_a_rank_has_an_eighth_of_the_heads_and_no_dense_layer(monkeypatch):
    monkeypatch.setattr(plan_slice, "random_model", lambda classes, sizes, device: sizes)
    rank = model_sizes.whole_model("deepseek_v32_rank", Clock.device)
    assert (rank["num_attention_heads"], rank["n_routed_experts"], rank["first_k_dense_replace"]) == (16, 32, 0)
    assert (rank["num_hidden_layers"], rank["index_n_heads"], rank["hidden_size"]) == (4, 64, 7168)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("triton_tem_fused_sparse_mla_4", "attention"),
        ("score", "indexer"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "projections"),
        ("row_kernel", "projections"),
        ("expert_kernel", "experts"),
        ("void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape", "experts"),
        ("triton_red_fused_add_mul_3", REST),
        ("void at::native::vectorized_gather_kernel<16, long>", REST),
    ],
)
def test_kernels_are_told_apart_by_name(kernel, group):
    assert by_group({kernel: 2.0}) == dict.fromkeys([*GROUPS, REST], 0.0) | {group: 2.0}


def test_a_page_shows_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    shared = {"model": V32, "what": "decode", "batch": 1}
    ours = {
        "way": OURS,
        "generate_us": 1600.0,
        "host_us": 51.2,
        "floor_us": 1200.0,
        "graph_bytes": 3 << 20,
        "parts": dict.fromkeys([*GROUPS, REST], 250.0),
    }
    rows = [
        {**shared, **ours, "tokens": 8192, "us": 1500.0},
        {**shared, **ours, "tokens": 131072, "us": 1800.0},
        {**shared, "tokens": 8192, "way": STOCK, "us": 6000.0},
        {**shared, "tokens": 8192, "way": "transformers, compiled", "refused": "out of memory"},
    ]
    figures = {"device": "a GPU", "torch": "2.11", "rows": rows}
    (tmp_path / "model.json").write_text(json.dumps(figures))
    result = bench("page", tmp_path / "model.json", "--out", tmp_path / "performance.md")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "performance.md").read_text()
    assert "| 1 | 8,192 | 1.500 | 6.000 4.00x | out of memory | 80% |  | 1.600 | 51 | 3.0 |" in text
    assert "| 1 | 131,072 | 1.800 |  |  | 67% | 1.20x | 1.600 | 51 | 3.0 |" in text
    assert f"| 1 | 131,072 | {' | '.join(['0.250'] * 5)} | 0.550 |" in text
    assert "(performance.png)" in text
    assert (tmp_path / "performance.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_of_something_else_is_refused(tmp_path):
    (tmp_path / "model.json").write_text("[]")
    result = bench("page", tmp_path / "model.json", "--out", tmp_path / "performance.md")
    assert result.exit_code == 2
    assert "expected a file that 'dsa-compile bench model --out' wrote" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("option", "given", "meant"),
    [("model", "deepseek_v23", V32), ("way", "dsa_compil", OURS), ("kind", "decod", "decode")],
)
def test_what_is_unknown_is_named(tiny, option, given, meant):
    result = bench("model", *ASKED, f"--{option}", given)
    assert result.exit_code == 2
    assert f"did you mean '{meant}'?" in " ".join(result.output.split())
