"""The console script, as a person at a shell meets it."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dsa_compile
from dsa_compile import evaluation
from dsa_compile.bench import startup
from dsa_compile.cli import app

PROMPT = "The code of zujezo is 7629.\nRecall: the code of zujezo is"


@pytest.fixture(scope="session")
def checkpoint(pytestconfig):
    return str(pytestconfig.rootpath / "examples" / "tinyseek-4m")


@pytest.fixture(scope="session")
def dense(checkpoint, tmp_path_factory):
    """As much of a checkpoint without indexers as a dry run reads."""
    folder = tmp_path_factory.mktemp("dense")
    for name in ("config.json", "model-00002-of-00002.safetensors"):
        shutil.copy(f"{checkpoint}/{name}", folder)
    return str(folder)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_generate_answers_and_reports(checkpoint, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    common = ("generate", checkpoint, "--max-new-tokens", 5)
    sparse = ("--selector", "attention", "--index-topk", 16, "--lowering", "eager")
    for arguments in (
        (*common, "--prompt", PROMPT, *sparse),
        (*common, "--prompt-file", tmp_path / "prompt.txt", "--stock"),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.lstrip().startswith("7629")
        for word in ("prompt 30 tokens", "tokens/s", "cache", "peak memory"):
            assert word in result.stdout


def test_generate_drafts(checkpoint, monkeypatch):
    monkeypatch.setattr(dsa_compile, "optimize", dsa_compile.prepare)  # uncompiled
    dense = ("--selector", "dense", "--lowering", "eager", "--drafts", 1, "--max-new-tokens", 4)
    result = run("generate", checkpoint, "--prompt", PROMPT, *dense)
    assert result.exit_code == 0, result.output
    assert result.stdout.lstrip().startswith("7629")
    assert re.search(r"; [12]\.\d\d tokens a step; cache", result.stdout)


def test_explain_prints_the_tables(checkpoint):
    plan = ("--plan", "mli", "--layer0", "previous_step")
    result = run("explain", checkpoint, "--selector", "attention", "--index-topk", 128, "--context", 4096, *plan)
    assert result.exit_code == 0, result.output
    assert "LLLLLS" in result.stdout
    assert "layers.5" in result.stdout
    assert "1,152" in result.stdout


def test_explain_needs_no_weights(checkpoint, tmp_path):
    shutil.copy(f"{checkpoint}/config.json", tmp_path)
    arguments = ("--selector", "attention", "--index-topk", 128)
    bare = run("explain", tmp_path, *arguments)
    assert bare.exit_code == 0, bare.output
    assert bare.stdout == run("explain", checkpoint, *arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("explain", "no/such/folder"), "expected a checkpoint folder, found none"),
        (("explain", "{empty}"), "with config.json; it has none"),
        (("explain", "{dense}"), "Three ways on"),
        (("generate", "{checkpoint}"), "exactly one of --prompt and --prompt-file"),
        (("generate", "{checkpoint}", "--prompt", "a", "--prompt-file", "b"), "exactly one of"),
        (("generate", "{checkpoint}", "--prompt-file", "no/such/file"), "cannot be read"),
        (("generate", "{checkpoint}", "--prompt", "a", "--selector", "best"), "selector: expected one of"),
        (("generate", "{checkpoint}", "--prompt", "a", "--selector", "dense", "--dtype", "int8"), "--dtype: expected"),
        (
            ("generate", "{checkpoint}", "--prompt", "a", "--selector", "dense", "--device", "tpu"),
            "--device: cannot use",
        ),
        (("generate", "{checkpoint}", "--prompt", "a", "--indexer", "no/such"), "found neither"),
        (
            ("generate", "{checkpoint}", "--prompt", "a", "--layer0", "last"),
            "layer0: expected one of 'serial', 'dense'",
        ),
        (("bench", "startup", "--layers", "1", "--out", "{empty}"), "--out: expected a file"),
        (("bench", "startup", "--model", "deepseek_v23"), "did you mean 'deepseek_v32'?"),
        (("eval", "{checkpoint}", "--plan", "mli", "--texts", "no/such"), "no/such: cannot be read as text"),
        (("eval", "{checkpoint}", "--plan", "mli", "--texts", "{empty}", "--out", "{empty}"), "--out: expected a file"),
        (("eval", "{checkpoint}", "--texts", "{empty}", "--kind", "double"), "kinds: expected some of single"),
        (("plan", "search", "{checkpoint}", "--texts", "no/such", "--out", "{empty}"), "cannot be read as text"),
        (("bench", "startup", "--layers", "1", "--out", "{empty}/no/such.json"), "--out: expected a file"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(arguments, text, checkpoint, dense, tmp_path):
    result = run(*(a.format(checkpoint=checkpoint, dense=dense, empty=tmp_path) for a in arguments))
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_bench_startup_prints_and_writes_its_figures(tmp_path):
    result = run("bench", "startup", "--layers", 2, "--lowering", "eager", "--out", tmp_path / "startup.json")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "startup.json").read_text())
    assert (figures["layers"], figures["lowering"]) == (2, "eager")
    assert all(f"{seconds:.3f}" in result.stdout for seconds in figures["seconds"].values())
    assert figures["seconds"]["second decode step"] < figures["seconds"]["first decode step"]
    assert figures["bodies"] == [1, 1]
    assert "1 + 1" in result.stdout


def test_a_fresh_start_is_timed_again_over_what_it_compiled(monkeypatch, tmp_path):
    """Both over one folder, which was empty and is gone afterwards."""
    folders = []

    def apart(function, layers, lowering, model):
        (folder,) = {os.environ[key] for key in startup.CACHES}
        folders.append((folder, os.listdir(folder)))
        (Path(folder) / "kernel").touch()
        seconds = dict.fromkeys(startup.STEPS, 10.0 / len(folders))
        return {"device": "a GPU", "seconds": seconds, "bodies": [5, 4]}

    monkeypatch.setattr(startup, "apart", apart)
    monkeypatch.setenv(startup.CACHES[0], "mine")
    monkeypatch.delenv(startup.CACHES[1], raising=False)
    result = run("bench", "startup", "--fresh", "--model", "deepseek_v32", "--out", tmp_path / "startup.json")
    assert result.exit_code == 0, result.output
    (first, empty), (second, filled) = folders
    assert first == second
    assert (empty, filled) == ([], ["kernel"])
    assert not Path(first).exists()
    assert [os.environ.get(key) for key in startup.CACHES] == ["mine", None]
    assert re.search(r"all\W+40\.000\W+20\.000", result.stdout)
    assert json.loads((tmp_path / "startup.json").read_text())["warm"]["bodies"] == [5, 4]


@pytest.fixture
def measured(checkpoint, tmp_path):
    """Arguments that measure plans of a checkpoint on two short texts."""
    (tmp_path / "texts").mkdir()
    for name in ("calendar", "csv"):
        text = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text()
        (tmp_path / "texts" / f"{name}.txt").write_text(text[:1000])
    return checkpoint, "--texts", tmp_path / "texts", "--tokens", 60, "--selector", "attention", "--index-topk", 16


def test_plan_search_leaves_a_plan_a_picture_and_a_state_that_it_goes_on_from(measured, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ("plan", "search", *measured, "--out", tmp_path / "new" / "out", "--retention", 0.8, "--no-mli")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "new" / "out" / "plan.json").read_text())
    assert f"plan: {found['plan']}" in result.stdout
    assert found["plan"].count("S") == 1
    assert [point["loss"] for point in found["curve"]] == [found["own"], pytest.approx(found["own"], abs=0.1)]
    assert (tmp_path / "new" / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert run(*arguments).stdout == result.stdout
    (tmp_path / "new" / "out" / "state.json").write_text("")
    assert "state.json: cannot be read as JSON" in run(*arguments).stderr


def test_eval_prints_draws_and_writes_its_figures(measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(evaluation, "answered", lambda questions, *rest: (True,) * len(questions))
    question = ("--kind", "single", "--length", 100, "--depth", 0.5, "--needles", 1)
    outputs = ("--out", tmp_path / "eval.json", "--pictures", tmp_path / "new" / "pictures")
    result = run("eval", *measured, "--plan", "mli+share:1/2", "--layer0", "dense", *question, *outputs)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "eval.json").read_text())
    assert figures["plan"]["letters"] == "DLSLSS"
    assert figures["dense"]["recalled"] == len(figures["questions"]) == 1
    assert figures["questions"][0]["length"] == 100
    for name in ("dense", "own", "plan"):
        assert f"{figures[name]['loss']:.4f}" in result.stdout
    assert figures["own"]["loss"] < figures["plan"]["loss"]
    assert sorted(p.name for p in (tmp_path / "new" / "pictures").iterdir()) == ["mass.png", "needles.png"]


def test_help_imports_neither_torch_nor_transformers():
    program = "import sys, dsa_compile.cli as c; c.app(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "explain" in shown
    assert "'torch'" not in shown
    assert "'transformers'" not in shown


@pytest.mark.slow
def test_61_layers_reach_their_first_decode_step_within_a_minute(tmp_path):
    # in its own process: pytest's capture of Dynamo's trace records takes seconds
    program = "import sys, dsa_compile.cli as c; c.app(sys.argv[1:])"
    arguments = ["bench", "startup", "--layers", "61", "--lowering", "eager", "--out", str(tmp_path / "startup.json")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)
    seconds = json.loads((tmp_path / "startup.json").read_text())["seconds"]
    assert seconds["optimize"] + seconds["first prefill"] + seconds["first decode step"] < 60
