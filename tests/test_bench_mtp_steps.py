"""``dsa-compile bench mtp --slice`` without a GPU: what it runs, and what it makes of the times."""

import json

import pytest
import torch
from stopwatch import Cpu, bench

import dsa_compile
from dsa_compile.bench import mtp_steps, timing
from dsa_compile.bench.mtp_steps import Row, break_even, continues
from dsa_compile.models.miniature import miniature

ASKED = ("--slice", "deepseek_v32", "--layers", 2, "--batch", 2, "--context", 20, "--context", 30)


@pytest.fixture
def tiny(monkeypatch):
    class Tiny:
        def model(self, layers, experts, device):
            return miniature("deepseek_v32", num_hidden_layers=layers, first_k_dense_replace=0 if experts else layers)

    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(mtp_steps, "apart", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(mtp_steps, "SLICES", {"deepseek_v32": Tiny()})
    monkeypatch.setattr(mtp_steps, "optimize", dsa_compile.prepare)


def test_every_width_runs_at_every_context_and_goes_on_as_plain_decoding(tiny, tmp_path):
    result = bench("mtp", *ASKED, "--drafts", 1, "--drafts", 3, "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    (setting,) = json.loads((tmp_path / "figures.json").read_text())["settings"]
    assert [row["drafts"] for row in setting["rows"]] == [0, 1, 3]
    assert all(row["us"] == {"20": 12.5, "30": 12.5} for row in setting["rows"])
    assert setting["rows"][2]["break_even"] == {"20": 0.0, "30": 0.0}


def test_a_step_that_goes_on_otherwise_is_wrong_and_has_no_time(tiny, monkeypatch, tmp_path):
    right = mtp_steps.measured

    def measured(setting, drafts):
        row, output = right(setting, drafts)
        return row, output if drafts == 0 else (output + 1) % 128

    monkeypatch.setattr(mtp_steps, "measured", measured)
    result = bench("mtp", *ASKED, "--drafts", 1, "--out", tmp_path / "figures.json")
    assert result.exit_code == 1
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["settings"][0]["rows"][1] == {"drafts": 1, "us": {}, "refused": "wrong", "break_even": {}}
    assert len(figures["wrong"]) == 1


def test_a_step_that_does_not_fit_is_said_so(tiny, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(mtp_steps, "fill", full)
    result = bench("mtp", *ASKED, "--drafts", 1)
    assert result.exit_code == 0
    assert result.stdout.count("out of memory") == 4


def test_an_unknown_slice_is_refused():
    result = bench("mtp", "--slice", "deepseek_v3")
    assert result.exit_code == 2
    assert "did you mean 'deepseek_v32'?" in result.stderr


def test_break_even_is_where_a_step_yields_as_many_tokens_as_plain_decoding_in_its_time():
    plain = Row(0, us={100: 10.0})
    assert break_even(plain, Row(1, us={100: 14.0}))[100] == pytest.approx(0.4, abs=1e-5)
    assert break_even(plain, Row(2, us={100: 17.5}))[100] == pytest.approx(0.5, abs=1e-5)
    assert break_even(plain, Row(3, us={100: 40.1}))[100] is None


def test_a_token_that_rounding_alone_prefers_is_as_good():
    logits = torch.tensor([[[0.0, 3.0, 2.99, 1.0]]])
    assert continues(logits, torch.tensor([[2]]))
    assert not continues(logits, torch.tensor([[3]]))
