"""``dsa-compile bench attention`` without a GPU: its cases, its verdicts, and what it prints and writes."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import test_sparse_mla_template
import torch
from stopwatch import Cpu, bench

from dsa_compile.bench import attention, attention_runs, cases, timing
from dsa_compile.bench.attention_cases import CASES, AttentionCase
from dsa_compile.bench.cases import Target

SMALL = {"rank": 32, "rope": 16, "topk": 24}
TINY = (
    AttentionCase("prefill-tiny", 1, 6, 4, 40, targets=(Target(1e9, "TFLOP/s"),), **SMALL),
    AttentionCase("decode-tiny-fp8", 3, 2, 4, 50, fp8=True, targets=(Target(15, "us"),), **SMALL),
)
NAN = float("nan")


@pytest.fixture
def tiny(monkeypatch):
    """The command on CPU, over `TINY` in three sets each."""
    monkeypatch.setattr(timing, "Gpu", Cpu)
    monkeypatch.setattr(attention, "CASES", TINY)
    monkeypatch.setattr(cases, "ROTATED", 3 * min(case.bytes for case in TINY))


def run(*arguments):
    return bench("attention", *arguments)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_what_is_right_is_timed_printed_and_written(tiny, lowering, tmp_path):
    result = run("--lowering", lowering, "--out", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["device"], figures["torch"], figures["lowering"]) == ("a CPU", torch.__version__, lowering)
    assert figures["ceilings"] == {"tflops": 800.0, "gbytes": 4000.0}
    assert figures["wrong"] == []
    for row, case in zip(figures["cases"], TINY, strict=True):
        assert (row["case"], row["us"], row["us_10"], row["us_90"]) == (case.name, 12.5, 12.25, 13.75)
        assert row["tflops"] == pytest.approx(case.flops / 12.5e-6 / 1e12)
        assert row["gbytes"] == pytest.approx(case.bytes / 12.5e-6 / 1e9)
        assert row["share"] == max(row["tflops"] / 800, row["gbytes"] / 4000)
        assert 0 < row["error"] <= 1.1 * row["eager_error"]
        assert row["configuration"] == "reference, no kernel"
    assert [row["met"] for row in figures["cases"]] == [False, True]
    for word in ("prefill-tiny", "12.2-13.8", ">= 1e+09 TFLOP/s, missed", "<= 15 us", "reference, no kernel"):
        assert word in result.stdout
    assert result.stderr.split() == [case.name for case in TINY]


@pytest.mark.parametrize(
    "bend",
    [
        lambda out, lse: (out * 1.01, lse),
        lambda out, lse: (out, lse + 1e-3),
        lambda out, lse: (out.index_fill(0, torch.tensor(0), NAN), lse),
        lambda out, lse: (out, lse.index_fill(0, torch.tensor(0), NAN)),
    ],
    ids=["out", "lse", "nan out", "nan lse"],
)
def test_what_is_wrong_has_no_speed_and_exits_with_1(tiny, bend, monkeypatch, tmp_path):
    monkeypatch.setattr(Cpu, "bend", staticmethod(bend))
    monkeypatch.setattr(Cpu, "time", lambda *_: pytest.fail("timed what is wrong"))
    result = run("--lowering", "eager", "--case", TINY[1].name, "--out", tmp_path / "figures.json")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["wrong"] == [TINY[1].name]
    (row,) = figures["cases"]
    assert not row["right"]
    assert not row["met"]
    assert not {"us", "us_10", "us_90", "tflops", "gbytes", "share"} & {*row}
    line = next(line for line in result.stdout.splitlines() if "WRONG" in line)
    assert [cell.strip() for cell in line.split("│")[2:7]] == ["WRONG", "", "", "", ""]


def test_an_installed_peer_is_checked_and_timed_beside(tiny, monkeypatch, tmp_path):
    def flash_mla_sparse_fwd(q, kv, indices, sm_scale):
        (T, H, width), slots = q.shape, kv.shape[0]
        assert (H, width, kv.shape[1:], indices.shape) == (4, 48, (1, 48), (6, 1, 24))
        if asked["refuses"]:
            raise RuntimeError("not [this] card\nbut another")
        whole = torch.tensor([0, slots]).int().expand(1, 1, T, 2)
        parts = (x[None] for x in (q[..., :32], q[..., 32:], kv[:, 0]))
        out, lse = torch.ops.dsa.sparse_mla(*parts, whole, None, indices[None, :, 0], sm_scale)
        return out[0], lse[0], lse[0]

    asked = {"refuses": False}
    peer = ModuleType("flash_mla")
    peer.__spec__ = ModuleSpec("flash_mla", None)
    peer.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    monkeypatch.setitem(sys.modules, "flash_mla", peer)
    for refuses in (False, True):
        asked["refuses"] = refuses
        result = run("--lowering", "eager", "--out", tmp_path / "figures.json")
        assert result.exit_code == 0, result.output
        ours, other, decode = json.loads((tmp_path / "figures.json").read_text())["cases"]
        assert [ours["peer"], other["peer"], decode["peer"]] == [None, "flash_mla", None]
        assert other["case"] == ours["case"] == "prefill-tiny"
        if refuses:
            assert other["refused"] == "not [this] card"
            assert "refused: not [this] card" in result.stdout
        else:
            assert (other["us"], other["error"]) == (12.5, ours["error"])


def test_the_cases_are_the_designs():
    names = {case.name: case for case in CASES}
    assert len(names) == len(CASES) == 18
    prefill = [(c.heads, c.keys) for c in CASES if c.name.startswith("prefill")]
    assert prefill == [(128, 8192), (128, 131072), (64, 8192), (64, 131072)]
    decode = {(c.fp8, c.heads, c.batch, c.queries) for c in CASES if c.name.startswith("decode")}
    assert decode == {
        *((fp8, 128, batch, 1) for fp8 in (True, False) for batch in (1, 8, 64, 128)),
        (True, 128, 128, 2),
        *((True, 64, batch, 1) for batch in (8, 64, 128)),
        *((fp8, 16, 64, 1) for fp8 in (True, False)),
    }
    assert {name: str(*case.targets) for name, case in names.items() if case.targets} == {
        "prefill-128h-8k": ">= 480 TFLOP/s",
        "prefill-128h-128k": ">= 430 TFLOP/s",
        "prefill-64h-8k": ">= 465 TFLOP/s",
        "prefill-64h-128k": ">= 390 TFLOP/s",
        "decode-fp8-b1": "<= 14 us",
        "decode-fp8-b8": "<= 30 us",
        "decode-fp8-b64": "<= 125 us",
        "decode-fp8-b128": "<= 245 us",
        "decode-fp8-b128-t2": "<= 480 us",
        "decode-fp8-64h-b8": "<= 24 us",
        "decode-fp8-64h-b64": "<= 85 us",
        "decode-fp8-64h-b128": "<= 130 us",
        "decode-bf16-b1": "<= 14 us",
        "decode-bf16-b8": "<= 28 us",
        "decode-bf16-b64": "<= 110 us",
        "decode-bf16-b128": "<= 210 us",
        "decode-fp8-16h-b64": "<= 50 us",
        "decode-bf16-16h-b64": "<= 55 us",
    }
    for case in CASES:
        assert (case.rank, case.rope, case.topk) == (512, 64, 2048)
        assert case.keys - case.queries + 1 >= case.topk  # so every query sees K slots
        pools = case.sets * case.batch * case.keys * (656 if case.fp8 else 1152)
        assert case.sets * case.bytes >= 512 << 20
        assert pools <= 12 << 30


def test_flops_and_bytes_of_a_case_by_hand():
    case = next(case for case in CASES if case.name == "decode-fp8-b64")
    assert case.flops == 64 * 2048 * 128 * 2 * (576 + 512) == 36_507_222_016
    rows, queries, out, indices = 64 * 2048 * 656, 64 * 128 * 576 * 2, 64 * 128 * 512 * 2, 64 * 2048 * 4
    assert case.bytes == rows + queries + out + indices == 104_333_312
    plain = next(case for case in CASES if case.name == "decode-bf16-b64")
    assert plain.bytes - case.bytes == 64 * 2048 * (1152 - 656)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_selections_are_distinct_ascending_and_visible(case):
    q, q_pe, pool, visible, picks = case.inputs(torch.device("cpu"), 3)
    assert q.shape == (case.batch, case.queries, 4, 32)
    assert q_pe.shape == (case.batch, case.queries, 4, 16)
    assert pool.shape == (case.batch, case.keys, 32 + 4 + 2 * 16 if case.fp8 else 48)
    assert picks.shape == (case.batch, case.queries, 24)
    assert picks.dtype == visible.dtype == torch.int32
    assert (picks.diff(dim=-1) > 0).all()
    assert (picks[..., 0] >= 0).all()
    assert (picks[..., -1] < visible[:, 0, :, 1]).all()
    assert torch.equal(visible[0, 0, :, 1], torch.arange(case.keys - case.queries + 1, case.keys + 1).int())
    assert not torch.equal(picks, case.inputs(torch.device("cpu"), 4)[4])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--case", "decode-fp8-64"), "unknown case 'decode-fp8-64'; did you mean 'decode-fp8-b64'?"),
        (("--lowering", "triton"), "lowering: expected one of"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(arguments, text):
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_configuration_is_read_from_what_inductor_writes(tmp_path):
    sources = test_sparse_mla_template.sources(B=8)
    kernels = "".join(
        f"a = async_compile.triton('a', '''\n{source}''', device_str='cuda')\n" for source in sources[::-1]
    )
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "candidate.py").write_text(sources[0].replace("BLOCK_N : tl.constexpr = 64", "nothing"))
    (tmp_path / "ab" / "graph.py").write_text(kernels)
    assert attention_runs.inductor_configuration(tmp_path) == "Triton, 64 x 64, 8 warps, 2 stages, 8 splits"
    assert attention_runs.inductor_configuration(tmp_path / "ab" / "none") is None


@pytest.mark.parametrize(
    ("heads", "rows", "configuration"),
    [
        (128, 8, "Gluon, 64 x 64, 16 warps, 2 stages, 8 splits"),
        (128, 64, "Gluon, 64 x 64, 16 warps, 2 stages, 1 splits"),
        (16, 1, "Triton, 16 x 32, 4 warps, 3 stages, 64 splits"),
    ],
)
def test_eager_says_what_it_launches(heads, rows, configuration, monkeypatch):
    monkeypatch.setattr(attention_runs.configs.Device, "of", lambda device: test_sparse_mla_template.H200)
    call = attention_runs.configs.Call(torch.bfloat16, heads, 512, 64, 2048, 32768, rows, False, False)
    monkeypatch.setattr(attention_runs.launch, "call_of", lambda *inputs: call)
    monkeypatch.setattr(attention_runs.gluon, "aligned", lambda *inputs: True)
    inputs = (SimpleNamespace(is_cuda=True, device=None), *[None] * 4)
    assert attention_runs.eager_configuration(inputs) == configuration


def test_caches_are_empty_and_put_back(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with attention_runs.fresh_caches() as folder:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
        assert os.environ["TRITON_CACHE_DIR"].startswith(str(folder))
        assert not list(folder.iterdir())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/kept"
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not folder.exists()
