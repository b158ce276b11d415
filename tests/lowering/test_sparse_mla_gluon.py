"""The kernel of ``dsa::sparse_mla`` for Hopper without a GPU: compiled, and chosen for what it can serve."""

import sys

import hopper
import pytest
import torch
from test_sparse_mla_template import H200, sources

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.sparse_mla import gluon
from dsa_compile.lowering.sparse_mla.configs import Call

PREFILL = Call(torch.bfloat16, 128, 512, 64, 2048, 8192, 4096, False, False)


@pytest.fixture
def absent(monkeypatch):
    """The installed triton has no Gluon."""
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    monkeypatch.delitem(sys.modules, "dsa_compile.lowering.sparse_mla.gluon_kernel", raising=False)
    monkeypatch.delattr("dsa_compile.lowering.sparse_mla.gluon_kernel", raising=False)
    gluon.available.cache_clear()
    yield
    gluon.available.cache_clear()


@pytest.mark.parametrize(
    ("heads", "fp8", "visible", "copies"),
    [(128, False, True, 36 + 36), (128, True, True, 36 + 2 * 4 + 4 + 4 * 4), (16, True, False, 36 + 2 * 4 + 4 + 4 * 4)],
)
def test_it_compiles_for_hopper_and_spills_nothing(heads, fp8, visible, copies, tmp_path):
    from dsa_compile.lowering.sparse_mla import gluon_kernel

    pointers = dict.fromkeys(("Q", "Q_PE", "OUT"), "*bf16") | dict.fromkeys(("VISIBLE", "INDICES"), "*i32")
    pointers |= {"LATENT": "*u8" if fp8 else "*bf16", "LSE": "*fp32"}
    constants = {"H": heads, "HAS_VISIBLE": visible, **gluon.constants(fp8)}
    options = {"num_warps": constants.pop("num_warps")}
    made = hopper.compiled_kernel(gluon_kernel.attend_kernel, pointers, constants, tmp_path, **options)
    assert made.stack == 0
    assert made.shared <= hopper.SHARED
    assert made.registers * 512 <= 64 << 10
    steps = [line for line in made.ptx.splitlines() if "wgmma.mma_async" in line]
    assert sum("m64n64k16" in line for line in steps) == 4 + 8 + 16 + 8
    assert sum("m64n128k16" in line for line in steps) == 2 * 2 * 4
    assert sum("cp.async.cg.shared.global" in line for line in made.ptx.splitlines()) == copies


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "it multiplies 16-bit floats, came torch.float32"),
        ({"fp8": True, "dtype": torch.float16}, "it makes bfloat16 of fp8 rows, the queries are torch.float16"),
        ({"rank": 256}, "it takes latent rows of 512 + 64 values, came 256 + 64"),
        ({"rope": 32}, "it takes latent rows of 512 + 64 values, came 512 + 32"),
        ({"topk": None}, "it gathers a selection from pools, came none"),
        ({"heads": 16, "rows": 33}, "its tiles are of 64 heads, too much padding for 16 where 33 rows wait"),
        ({"heads": 16, "rows": 64}, None),
        ({"heads": 96, "fp8": True}, None),
        ({"rows": 1}, None),
        ({"dtype": torch.float16}, None),
    ],
    ids=str,
)
def test_refusals_name_the_limit(change, reason):
    assert gluon.refusal(Call(**{**vars(PREFILL), **change}), H200, False, 0.1) == reason


@pytest.mark.parametrize(
    ("device", "paged", "scale", "reason"),
    [
        (Device((10, 0), 132, hopper.SHARED), False, 0.1, "it is for compute capability 9.0, the device has 10.0"),
        (H200, True, 0.1, "it gathers a selection from pools, came pages"),
        (H200, False, -1.0, "it takes the largest score before it scales by a number above 0, came -1.0"),
        (H200, False, float("nan"), "it takes the largest score before it scales by a number above 0, came nan"),
    ],
    ids=str,
)
def test_refusals_name_the_device_the_pages_and_the_scale(device, paged, scale, reason):
    assert gluon.refusal(PREFILL, device, paged, scale) == reason


def test_a_graph_calls_the_op_where_it_serves():
    assert sources(portable=False) == sources(T=64, portable=False) == []
    assert len(sources(T=64, page=64, portable=False)) == 1


def test_where_gluon_is_absent_the_template_serves_and_one_warning_says_so(absent, recwarn):
    assert len(sources(T=64, portable=False)) == len(sources(T=64, H=64, portable=False)) == 1
    (warning,) = [w for w in recwarn if "dsa::sparse_mla" in str(w.message)]
    assert "runs as its portable Triton kernel, not as the faster one for Hopper" in str(warning.message)
    assert "triton.experimental.gluon" in str(warning.message)


def test_rows_are_copied_in_pieces_of_16_bytes():
    rows = torch.zeros(1, 3, 64, 640, dtype=torch.bfloat16)
    assert gluon.aligned(rows, rows[..., :512], rows[..., 128:], rows.transpose(1, 2), rows[:, ::2])
    assert gluon.aligned(rows.as_strided((1, 3, 64, 512), (7, 640 * 64, 640, 1)))
    assert not gluon.aligned(rows, rows[..., 1:])
    assert not gluon.aligned(rows.transpose(2, 3))
    assert not gluon.aligned(torch.zeros(2, 3, 64, 520, dtype=torch.bfloat16))
