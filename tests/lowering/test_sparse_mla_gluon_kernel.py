"""The kernel of ``dsa::sparse_mla`` for Hopper, on one: hostile data, bits that never change, and no endless wait."""

import subprocess
import sys

import pytest
import torch
from test_sparse_mla_kernel import CUDA, NAN, Case

from dsa_compile import lowering
from dsa_compile.lowering.sparse_mla import gluon

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == gluon.CAPABILITY
pytestmark = pytest.mark.skipif(not HOPPER, reason="runs on a GPU of compute capability 9.0")


class Direct(Case):
    """A call that goes to the kernel however few rows it has, in ``splits`` shares of a row."""

    splits = 1

    def run(self):
        return gluon.launch(self.q, self.q_pe, self.pool, self.visible, self.picks, self.scale, self.splits)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("heads", [64, 128, 192])
@pytest.mark.parametrize("topk", [1, 33, 64, 65, 130, 512, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_width_of_selection(heads, topk, dtype):
    Direct(H=heads, B=3, T=3, K=topk, S=3000, dtype=dtype).check()


@pytest.mark.parametrize("heads", [1, 16, 22, 64, 96, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_any_number_of_heads_and_splits(heads, fp8):
    case = Direct(H=heads, B=3, T=3, K=500, S=700, fp8=fp8)
    for case.splits in (1, 2, 3, 8):
        case.check()


def test_large_scores_and_any_scale():
    case = Direct(B=2, T=3, H=64, K=200)
    case.q, case.scale = case.q * 40, 0.7
    (out, lse), (exact, exact_lse) = case.run(), case.exact()
    assert (out.double() - exact).norm() <= 1.1 * (case.eager().double() - exact).norm()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)


def test_all_slots_are_seen_without_ranges():
    case, open_ = Direct(H=64, K=100), Direct(H=64, K=100)
    case.visible, open_.visible = torch.tensor([0, 300], device=CUDA).int().expand(2, 1, 2, 2), None
    assert equal(case.run(), open_.run())


def test_rows_that_see_nothing_give_zeros():
    case = Direct(B=5, T=1, H=64, K=96)
    case.visible = torch.tensor([[0, 0], [-7, -3], [200, 100], [0, -1], [300, 2**31 - 1]], device=CUDA).int()
    case.visible = case.visible.view(5, 1, 1, 2)
    out, lse = case.run()
    assert not out.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_indices_outside_and_unselected_nan_do_nothing(fp8, splits):
    case = Direct(B=2, T=8, H=128, K=160, S=400, fp8=fp8, kinds=("outside", "leading", "none", "last", "holes"))
    case.splits = splits
    case.check()
    used = torch.zeros(2, 401, dtype=torch.bool, device=CUDA)
    seen = case.picks.masked_fill((case.picks < 0) | (case.picks >= case.visible[:, 0, :, 1:]), 400)
    used.scatter_(1, seen.flatten(1).long(), True)
    before = case.run()
    case.pool.masked_fill_(~used[:, :400, None], 255 if fp8 else NAN)
    assert equal(before, case.run())


def test_a_selected_nan_reaches_its_rows_alone():
    case = Direct(B=2, T=8, H=64, K=64)
    before = case.run()
    case.pool[1, 40, 5] = NAN
    hit = (case.picks[1] == 40).any(-1) & (case.visible[1, 0, :, 1] > 40)
    assert 0 < hit.sum() < 8
    for clean, after in zip(before, case.run()):
        assert after[1, hit].isnan().all()
        assert torch.equal(after[0], clean[0])
        assert torch.equal(after[1, ~hit], clean[1, ~hit])


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("fp8", [False, True])
def test_memory_around_the_outputs_stays(splits, fp8, monkeypatch):
    case, guarded = Direct(H=86, K=100, fp8=fp8), []
    case.splits = splits

    def new_empty(self, *shape, dtype=None):
        whole = torch.full((torch.Size(shape).numel() + 2048,), 7.5, dtype=dtype or self.dtype, device=self.device)
        guarded.append(whole)
        return whole[1024:-1024].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    case.run()
    assert len(guarded) == 2 * splits
    for whole in guarded:
        assert (whole[:1024] == 7.5).all()
        assert (whole[-1024:] == 7.5).all()


def test_queries_need_no_order_in_memory():
    case = Direct(H=128)
    want = case.run()
    case.q = case.q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    case.q_pe = case.q_pe.transpose(1, 2).contiguous().transpose(1, 2)
    assert gluon.aligned(case.q, case.q_pe)
    assert equal(want, case.run())


def full(**options):
    """As many rows as a device has processors, through the op."""
    return Case(B=2, T=70, H=128, K=96, S=200, **options)


def test_the_op_and_its_graph_launch_it():
    case = full()
    want = gluon.launch(case.q, case.q_pe, case.pool, case.visible, case.picks, case.scale)
    assert equal(want, case.run())
    lowering.register_inductor()
    compiled = torch.compile(lambda *inputs: torch.ops.dsa.sparse_mla(*inputs[:4], None, inputs[4], 1.0))
    assert equal(want, compiled(case.q, case.q_pe, case.pool, case.visible, case.picks))


def test_rows_out_of_line_are_left_to_the_template(monkeypatch):
    monkeypatch.setattr(gluon, "launch", lambda *_: pytest.fail("launched on rows that it cannot copy"))
    case = full()
    case.pool = torch.nn.functional.pad(case.pool, (1, 7))[..., 1:577]
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize(("fp8", "splits"), [(False, 1), (True, 1), (True, 3)])
def test_same_bits_on_a_thousand_runs(fp8, splits):
    case = Direct(B=2, T=70, H=128, K=200, S=300, fp8=fp8)
    case.splits = splits
    want = case.run()
    for _ in range(1000):
        assert equal(want, case.run())


HOSTILE = """
import itertools
import torch
from dsa_compile.lowering.sparse_mla import gluon

torch.manual_seed(0)
int32 = {"dtype": torch.int32, "device": "cuda"}
for K, slots, filler in itertools.product((1, 64, 130, 2048), (1, 300), (0.0, float("nan"), float("inf"))):
    q, q_pe = (torch.full((2, 80, 64, n), filler, dtype=torch.bfloat16, device="cuda") for n in (512, 64))
    pool = torch.full((2, slots, 576), filler, dtype=torch.bfloat16, device="cuda")
    codes = torch.full((2, slots, 656), 0 if filler == 0 else 255, dtype=torch.uint8, device="cuda")
    for picks in (
        torch.full((2, 80, K), -1, **int32),
        torch.full((2, 80, K), 2**31 - 1, **int32),
        torch.zeros(2, 80, K, **int32),
        torch.randint(-(2**31), 2**31 - 1, (2, 80, K), **int32),
        torch.randint(-2, slots + 2, (2, 80, K), **int32),
    ):
        for ends in (0, -5, slots, 2**31 - 1):
            visible = torch.tensor([0, ends], **int32).expand(2, 1, 80, 2)
            gluon.launch(q, q_pe, pool, visible, picks, 1.0)
            gluon.launch(q, q_pe, codes, visible, picks, 1.0, 3)
torch.cuda.synchronize()
print("ended")
"""


def test_no_input_hangs_it():
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ended\n", done.stderr
