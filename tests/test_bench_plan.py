"""``dsa-compile bench plan`` without a GPU: what it runs, and what it makes of the times."""

import json
import os
import time

import pytest
import torch
from stopwatch import Cpu, bench

from dsa_compile.bench import plan, timing
from dsa_compile.bench.apart import apart, side_by_side, turn
from dsa_compile.bench.plan import IN_TURN, ONCE, Row, Setting, hiding
from dsa_compile.models.miniature import miniature

ASKED = ("--layers", 3, "--batch", 2, "--context", 20, "--context", 30, "--plan", "share:1/2")


@pytest.fixture
def tiny(monkeypatch):
    class Tiny:
        def model(self, layers, experts, device):
            return miniature("deepseek_v32", num_hidden_layers=layers, first_k_dense_replace=0 if experts else layers)

    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(plan, "side_by_side", lambda function, calls: [function(*arguments) for arguments in calls])
    monkeypatch.setattr(plan, "SLICES", {"deepseek_v32": Tiny()})
    monkeypatch.setattr(
        plan, "optimize", lambda model, **options: optimize(model, **options | {"lowering": "eager", "mode": None})
    )


optimize = plan.optimize


def test_every_plan_runs_at_every_context(tiny, tmp_path):
    result = bench("plan", *ASKED, "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    (setting,) = json.loads((tmp_path / "figures.json").read_text())["settings"]
    indexers = {row["plan"]: row["indexers"] for row in setting["rows"]}
    assert indexers == {"own": 3, ONCE: 1, "mli": 2, IN_TURN: 2, "share:1/2": 2}
    assert all(row["us"] == {"20": 12.5, "30": 12.5} for row in setting["rows"])
    assert result.stdout.count("1.00x") == 10


def test_overlap_that_changes_a_bit_is_wrong(tiny, monkeypatch, tmp_path):
    right = plan.measured
    monkeypatch.setattr(plan, "measured", lambda s, wanted: (right(s, wanted)[0], torch.tensor(len(wanted))))
    result = bench("plan", *ASKED, "--out", tmp_path / "figures.json")
    assert result.exit_code == 1


def test_a_plan_that_does_not_fit_is_said_so(tiny, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(plan, "fill", full)
    result = bench("plan", *ASKED)
    assert result.exit_code == 0
    assert result.stdout.count("out of memory") == 10


def test_what_is_hidden_is_told_from_what_is_left_out():
    """Ten layers of 10 us beside an indexer of 6: MLI runs one alone, eight of which it hides half, and drops one."""
    setting = Setting("deepseek_v32", 10, 1, False, (100,), "default")
    times = {"own": 160.0, ONCE: 106.0, "mli": 100 + 6 + 8 * 3.0}
    rows = [Row(name, us={100: us}) for name, us in times.items()]
    found = hiding(rows, setting, 100)
    assert (found.indexer, found.ceiling, found.share) == (6, 100, 0.5)
    assert hiding(rows[:2], setting, 100) is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--slice", "deepseek_v23"), "did you mean 'deepseek_v32'?"),
        (("--plan", "shared:1/2"), "the plans are own, model, mli"),
        (("--layers", 2), "greater than or equal to 3"),
    ],
)
def test_bad_input_is_named(tiny, wrong, said):
    result = bench("plan", *ASKED, *wrong)
    assert result.exit_code != 0
    assert said in " ".join(result.output.split())


def prepared(seconds):
    time.sleep(seconds)
    ready = time.monotonic()
    if seconds == 0:
        raise ValueError("no room")
    with turn():
        begun = time.monotonic()
        time.sleep(0.1)
        return os.getpid(), ready, begun, time.monotonic()


def test_plans_are_timed_one_by_one_when_all_are_compiled():
    pids, ready, begun, ended = zip(*side_by_side(prepared, [(0.1,), (0.5,)]))
    assert len({os.getpid(), *pids}) == 3
    assert max(ready) <= min(begun)
    assert min(ended) <= max(begun)


def test_a_plan_that_fails_before_its_turn_lets_the_others_go_on():
    with pytest.raises(ValueError, match="no room"):
        side_by_side(prepared, [(0,), (0.1,)])


class Bound(Exception):
    """An error that cannot be made anew from what it says, as Inductor's are."""

    def __init__(self, error, frame):
        super().__init__(f"{error} in {frame}")


def stopped():
    raise Bound("no codegen", "a frame")


def test_an_error_that_cannot_leave_its_process_says_what_it_was():
    with pytest.raises(RuntimeError, match="Bound: no codegen in a frame"):
        apart(stopped)
