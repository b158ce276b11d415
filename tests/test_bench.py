"""What the benchmarks of kernels share: no speed for what is wrong, targets, peers, ceilings, figures on disk."""

import json
from dataclasses import dataclass

import pytest
import torch
from stopwatch import Cpu, bench

from dsa_compile import compat
from dsa_compile.bench import cases, timing
from dsa_compile.bench.cases import Case, Target, causal_tail, spread
from dsa_compile.bench.harness import Bench, Peer, run
from dsa_compile.bench.table import CASE, SHARE, TARGET, TIME, figure
from dsa_compile.bench.timing import Recording, Times
from dsa_compile.errors import ConfigError


@dataclass(frozen=True)
class Doubling(Case):
    """Twice each of some numbers, as floats and as integers."""

    fp8: bool = False

    @property
    def fp8_products(self):
        return self.fp8

    @property
    def flops(self):
        return 10**10

    @property
    def bytes(self):
        return 10**6

    def inputs(self, device, seed):
        return (torch.arange(4.0) + seed,)


@dataclass(frozen=True)
class Verdict:
    worst: float

    @property
    def right(self):
        return self.worst == 0


def double(x):
    return 2 * x, (2 * x).int()


def checked(case, sets, outputs):
    return Verdict(max((y - 2 * x).abs().max().item() for (x,), ys in zip(sets, outputs) for y in ys))


def doubling(*cases, launch=double, peers=()):
    return Bench(
        title="doubling",
        cases=cases,
        record=lambda case, sets, gpu: (gpu.record(launch, sets), {"by": "hand"}),
        check=checked,
        columns=(CASE, TIME, SHARE, figure("worst", "worst", ".2f"), TARGET),
        peers=lambda case: peers,
        note="on paper",
    )


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """In three sets of inputs for each case."""
    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(cases, "ROTATED", 3 * 10**6)


def timed(monkeypatch, *micros):
    """Let launches take these times in turn."""
    left = iter(micros)
    monkeypatch.setattr(Cpu, "time", lambda *_: Times(*[next(left)] * 3))


def test_a_row_says_what_was_found_how_fast_and_how_near_the_ceiling(capsys):
    figures = run(doubling(Doubling("plain"), Doubling("fp8", fp8=True)), None, None)
    plain, fp8 = figures["cases"]
    assert plain == {
        **{"case": "plain", "peer": None, "worst": 0.0, "right": True, "us": 12.5, "us_10": 12.25, "us_90": 13.75},
        **{"tflops": 800.0, "gbytes": 80.0, "share": 1.0, "by": "hand"},
    }
    assert fp8["share"] == 0.5
    printed = capsys.readouterr().out
    assert "doubling, a CPU" in printed
    caption = "ceilings: bf16 matmul 800 TFLOP/s, fp8 matmul 1600 TFLOP/s, memory 4000 GB/s; on paper"
    assert caption in " ".join(printed.split())


def test_the_fp8_ceiling_is_measured_for_fp8_products_alone(capsys):
    both = (Doubling("plain"), Doubling("fp8", fp8=True))
    assert run(doubling(*both), ["plain"], None)["ceilings"] == {"tflops": 800.0, "gbytes": 4000.0}
    assert run(doubling(*both), ["fp8"], None)["ceilings"]["fp8_tflops"] == 1600.0


def test_what_is_wrong_is_never_timed(monkeypatch, capsys):
    monkeypatch.setattr(Cpu, "time", lambda *_: pytest.fail("timed what is wrong"))
    figures = run(doubling(Doubling("off", targets=(Target(1e9, "us"),)), launch=lambda x: (2 * x + 0.25,)), None, None)
    assert figures["wrong"] == ["off"]
    assert figures["cases"] == [
        {
            "case": "off",
            "peer": None,
            "worst": 0.25,
            "right": False,
            "by": "hand",
            "target": "<= 1e+09 us",
            "met": False,
        }
    ]
    line = next(line for line in capsys.readouterr().out.splitlines() if "WRONG" in line)
    assert [cell.strip() for cell in line.split("│")[1:-1]] == ["off", "WRONG", "", "0.25", "<= 1e+09 us"]


def test_what_a_launch_does_not_write_is_wrong():
    """Right outputs of an earlier run are no proof."""
    sets = [(torch.arange(4.0),), (torch.arange(5.0),)]
    outputs = [double(*inputs) for inputs in sets]
    assert checked(None, sets, outputs).right
    assert not checked(None, sets, Recording(outputs, lambda: None).rewritten()).right
    assert all(floats.isnan().all() and (ints == -(2**31)).all() for floats, ints in outputs)


def test_figures_are_on_disk_after_each_case(monkeypatch, tmp_path, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    out = tmp_path / "figures.json"
    with monkeypatch.context() as patch:
        timed(patch, 10.0)
        patch.setattr(Cpu, "release", lambda self: patch.setattr(Cpu, "record", stop))
        with pytest.raises(KeyboardInterrupt):
            run(doubling(Doubling("first"), Doubling("second")), None, out)
    figures = json.loads(out.read_text())
    assert (figures["device"], figures["torch"]) == ("a CPU", torch.__version__)
    assert [row["case"] for row in figures["cases"]] == ["first"]


def test_cases_run_once_each_in_the_order_asked_for(capsys):
    bench = doubling(Doubling("a"), Doubling("b"), Doubling("c"))
    assert [row["case"] for row in run(bench, ["c", "a", "c"], None)["cases"]] == ["c", "a"]
    with pytest.raises(ConfigError, match=r"--case: unknown case 'd'; the cases are a, b, c\."):
        run(bench, ["d"], None)


def test_peers_are_checked_and_compared(monkeypatch, capsys):
    def refuses(x):
        raise RuntimeError("not [this] card\nbut another")

    peers = (
        Peer("torch.topk", double, checked),
        Peer("wrong", lambda x: (2 * x + 1,), checked),
        Peer("refuses", refuses, checked),
        Peer("halves", lambda x, y: (x + y,), checked, lambda inputs: inputs * 2),
    )
    timed(monkeypatch, 10.0, 25.0, 5.0)
    case = Doubling("a", targets=(Target(10, "us"), Target(2.5, "x torch.topk")))
    ours, *others = run(doubling(case, peers=peers), None, None)["cases"]
    assert (ours["target"], ours["met"]) == ("<= 10 us, >= 2.5 x torch.topk", True)
    assert [(row["case"], row["peer"], row.get("speedup")) for row in others] == [
        ("a", "torch.topk", 2.5),
        ("a", "wrong", None),
        ("a", "refuses", None),
        ("a", "halves", 0.5),
    ]
    assert "us" not in others[1]
    assert others[2] == {"case": "a", "peer": "refuses", "refused": "not [this] card"}
    assert "refused: not [this] card" in capsys.readouterr().out


@pytest.mark.parametrize("peer", [double, lambda x: (2 * x + 1,)], ids=["slow", "wrong"])
def test_a_missed_target_is_marked(peer, monkeypatch, capsys):
    timed(monkeypatch, 10.0, 19.0)
    case = Doubling("a", targets=(Target(2, "x torch.topk"),))
    (ours, _) = run(doubling(case, peers=(Peer("torch.topk", peer, checked),)), None, None)["cases"]
    assert not ours["met"]
    assert ">= 2 x torch.topk, missed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "text", "met", "missed"),
    [
        (Target(22, "us"), "<= 22 us", {"us": 22.0}, {"us": 22.1}),
        (Target(9.5, "us"), "<= 9.5 us", {"us": 9.5}, {"tflops": 1.0}),
        (Target(720, "TFLOP/s"), ">= 720 TFLOP/s", {"tflops": 720.0}, {"tflops": 719.0}),
        (Target(281.6, "MiB extra"), "<= 281.6 MiB extra", {"extra_mib": 281.0}, {"extra_mib": 282.0}),
        (Target(2, "x torch.topk"), ">= 2 x torch.topk", {"peer": "torch.topk", "speedup": 2.0}, {"speedup": 3.0}),
    ],
)
def test_targets_are_bounds(target, text, met, missed):
    assert str(target) == text
    assert target.met([{"peer": None, **met}])
    assert not target.met([{"peer": None, **missed}])


def test_sampled_rows_are_distinct_and_reach_the_last_launch():
    assert spread(1, 1, 32) == [(0, 0)]
    assert spread(2, 3, 32) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    places = spread(3, 4096, 32)
    assert len(set(places)) == 32
    assert (places[0], places[-1]) == ((0, 0), (2, 4095))
    assert {s for s, _ in places} == {0, 1, 2}


def test_the_last_queries_see_all_before_them():
    assert causal_tail(2, 3, 5, torch.device("cpu")).tolist() == [[[[0, 3], [0, 4], [0, 5]]]] * 2


@pytest.mark.parametrize("name", ["attention", "indexer", "topk", "select", "warmup"])
def test_what_cannot_work_is_one_line_and_exit_code_2(name, monkeypatch):
    monkeypatch.setattr(timing, "Gpu", GPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, text in (
        (("--case", "none"), "--case: unknown case 'none'; the cases are "),
        (("--out", "no/such/folder/a.json"), "--out: expected a file"),
        ((), "expected a CUDA device, found none"),
    ):
        result = bench(name, *arguments)
        assert result.exit_code == 2
        assert text in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


GPU = timing.Gpu


def test_a_gpu_without_fp8_products_is_named(monkeypatch):
    card = {"is_available": True, "current_device": 0, "get_device_name": "A100", "get_device_capability": (8, 0)}
    for name, value in card.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    with pytest.raises(ConfigError, match=r"capability 8\.9 or later, found A100 of 8\.0\. Choose cases in bf16"):
        GPU().ceilings(fp8=True)


def test_an_fp8_matmul_is_one():
    a, b = (torch.randn(rows, 64).to(torch.float8_e4m3fn) for rows in (32, 16))
    product = compat.fp8_matmul(a, b, torch.ones(()))
    torch.testing.assert_close(product, (a.float() @ b.float().t()).bfloat16(), rtol=2**-7, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
def test_extra_bytes_are_those_beside_inputs_and_outputs():
    def launch(x):
        held = [torch.zeros(8 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
        return (x + held[0][0],)

    x = torch.zeros(1 << 20, device="cuda")
    assert 24 << 20 <= GPU().extra_bytes(launch, (x,)) < 25 << 20
