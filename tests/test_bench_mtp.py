"""``dsa-compile bench mtp --checkpoint`` without a GPU: what it runs, and what it makes of tokens and times."""

import json
from pathlib import Path

import pytest
import torch
from stopwatch import Cpu, bench

import dsa_compile
from dsa_compile.bench import mtp, timing
from dsa_compile.bench.mtp import THEIRS
from dsa_compile.measure import Clock

FOLDER = Path(__file__).parent.parent / "examples" / "tinyseek-4m"
ASKED = ("--checkpoint", FOLDER, "--context", 40, "--new-tokens", 8)


class Steady(Clock):
    """A hundredth of a second for whatever is streamed."""

    def put(self, value):
        self.marks.append(0.01 * len(self.marks))


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(mtp, "Clock", Steady)
    monkeypatch.setattr(mtp, "side_by_side", lambda function, calls: [function(*arguments) for arguments in calls])
    monkeypatch.setattr(mtp, "optimize", lambda model, mode, **options: dsa_compile.prepare(model, **options))
    monkeypatch.setattr(mtp, "WARM_UP", 1)
    monkeypatch.setattr(mtp, "RUNS", 1)


def rows_of(path):
    (setting,) = json.loads(path.read_text())["settings"]
    return {row["way"]: row for row in setting["rows"]}


def test_every_number_of_drafts_is_timed_beside_transformers(uncompiled, tmp_path):
    result = bench("mtp", *ASKED, "--batch", 1, "--drafts", 1, "--drafts", 2, "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "figures.json")
    assert list(rows) == ["0 drafts", "1 drafts", "2 drafts", THEIRS]
    *ours, theirs = (row["rate"] for row in rows.values())
    assert ours == pytest.approx([100.0] * 3)
    assert theirs == pytest.approx(100.0 * rows[THEIRS]["accept_length"]), "it streams all tokens of a step at once"
    assert rows["0 drafts"]["accept_length"] == 1 < rows["1 drafts"]["accept_length"] <= 2
    assert rows["1 drafts"]["accept_length"] == rows[THEIRS]["accept_length"]
    assert result.stdout.count("1.00x") == 3


def test_a_batch_is_padded_and_counts_all_its_tokens(uncompiled, tmp_path):
    result = bench("mtp", *ASKED, "--batch", 2, "--drafts", 1, "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "figures.json")
    assert list(rows) == ["0 drafts", "1 drafts"]
    assert rows["1 drafts"]["rate"] == pytest.approx(200.0)


def test_other_tokens_than_those_of_plain_decoding_are_wrong_and_have_no_speed(uncompiled, monkeypatch, tmp_path):
    def measured(setting, way):
        return mtp.Row(str(way), rate=100.0, accept_length=2.0), torch.tensor([[1, 2, 3 + (way == 1)]])

    monkeypatch.setattr(mtp, "measured", measured)
    result = bench("mtp", *ASKED, "--batch", 2, "--drafts", 1, "--drafts", 2, "--out", tmp_path / "figures.json")
    assert result.exit_code == 1
    rows = rows_of(tmp_path / "figures.json")
    assert (rows["1"]["rate"], rows["1"]["refused"], rows["2"]["rate"]) == (None, "wrong", 100.0)
    assert "wrong" in result.stdout


def test_transformers_may_round_to_other_tokens_and_is_timed(uncompiled, monkeypatch, tmp_path):
    def measured(setting, way):
        return mtp.Row(str(way), rate=100.0, accept_length=2.0), torch.tensor([[1, 2, 3 + (way == THEIRS)]])

    monkeypatch.setattr(mtp, "measured", measured)
    result = bench("mtp", *ASKED, "--batch", 1, "--drafts", 1, "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "figures.json")
    assert (rows[THEIRS]["rate"], rows[THEIRS]["differs"], rows["1"]["differs"]) == (100.0, True, False)
    assert "other tokens" in result.stdout


def test_where_plain_decoding_does_not_fit_nothing_is_wrong(uncompiled, monkeypatch, tmp_path):
    def measured(setting, way):
        row = mtp.Row(str(way), rate=100.0, accept_length=2.0) if way else mtp.Row("0", refused="out of memory")
        return row, torch.ones(1, 3 if way else 0)

    monkeypatch.setattr(mtp, "measured", measured)
    result = bench("mtp", *ASKED, "--batch", 2, "--drafts", 1, "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    assert "out of memory" in result.stdout
    assert rows_of(tmp_path / "figures.json")["1"]["rate"] == 100.0


def test_what_transformers_cannot_draft_for_is_said(uncompiled):
    setting = mtp.Setting(FOLDER, 2, 40, 8, "float32", "default")
    row, _ = mtp.measured(setting, THEIRS)
    assert row.rate is None
    assert "only supported for batch_size = 1" in row.refused


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "expected either --checkpoint or --slice"),
        (("--checkpoint", FOLDER, "--slice", "deepseek_v32"), "expected either --checkpoint or --slice"),
        (("--checkpoint", FOLDER, "--layers", 3), "--layers has no meaning with --checkpoint"),
        (("--slice", "deepseek_v32", "--new-tokens", 8), "--new-tokens has no meaning with --slice"),
    ],
)
def test_generation_and_steps_are_two_things(arguments, error):
    result = bench("mtp", *arguments)
    assert result.exit_code == 2
    assert error in result.stderr
