"""The masked kernels on a GPU: hostile data, every shape, and bits that never change."""

import naive
import pytest
import torch
from cases import V32
from strategies import SELECTION_KINDS, causal, mask_of, selection_row

from dsa_compile.dims import LayerDims
from dsa_compile.lowering.device import Device
from dsa_compile.lowering.masked_mha import configs, gluon, launch
from dsa_compile.lowering.prefill_mla import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
CUDA = torch.device("cuda")
NAN = float("nan")


class Case:
    """Inputs of one call. ``portable``: even where the kernel for Hopper would serve."""

    def __init__(self, B=2, T=150, S=700, K=130, H=3, *, dims=V32, dtype=torch.bfloat16, portable=False, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.dims = LayerDims(**{**vars(dims), "n_heads": H, "indexer": None})
        R, N, P, V = (dims.kv_lora_rank, dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)

        def normal(*shape, scale=1.0):
            return (torch.randn(shape, generator=generator) * scale).to(CUDA, dtype)

        self.q, self.rows = normal(B, T, H, N + P).transpose(1, 2), normal(B, S, R + P)
        self.weight, self.scale = normal(H * (N + V), R, scale=R**-0.5), (N + P) ** -0.5
        self.visible, self.picks = causal(B, T, S).to(CUDA), None
        if K is not None:
            kinds = [SELECTION_KINDS[i % len(SELECTION_KINDS)] for i in range(B * T)]
            self.picks = torch.stack([selection_row(kind, S, K, generator) for kind in kinds]).view(B, T, K).to(CUDA)
        self.config = configs.config(self.dims, dtype, Device.of(CUDA)) if portable else None

    def run(self):
        return launch.masked_mha(
            self.q, self.rows, self.weight, self.visible, self.picks, self.scale, self.dims, self.config
        )

    def exact(self):
        wide = (x.double() for x in (self.q, self.rows, self.weight))
        return reference.expanded(*wide, self.visible, self.picks, self.dims.qk_nope_head_dim, self.scale)

    def eager(self):
        """The same attention as everyday torch code in the inputs' own dtype."""
        R, S = self.dims.kv_lora_rank, self.rows.shape[1]
        keep = mask_of(self.visible, S)
        if self.picks is not None:
            inside = torch.where((self.picks < 0) | (self.picks >= S), S, self.picks).long()
            chosen = torch.zeros(*keep.shape[:1], keep.shape[2], S + 1, dtype=torch.bool, device=CUDA)
            keep = keep & chosen.scatter(-1, inside, True)[:, None, :, :S]
        halves = self.rows[..., :R], self.rows[..., R:]
        out = naive.dense(self.q, *halves, self.weight, self.dims.qk_nope_head_dim, self.scale, keep)
        return out.nan_to_num(0)

    def check(self):
        """Error against float64 within 1.1 times that of eager code; rows that see nothing are zeros."""
        out, exact = self.run(), self.exact()
        error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (out, self.eager()))
        assert error <= 1.1 * allowed + 1e-6
        assert not out[(exact == 0).all(-1)].any()


@pytest.fixture(params=[False, True], ids=["hopper", "portable"])
def portable(request):
    if not request.param and torch.cuda.get_device_capability() != gluon.CAPABILITY:
        pytest.skip("runs on a GPU of compute capability 9.0")
    return request.param


@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (1, 300), (64, 64), (65, 129), (150, 700), (257, 1025)])
@pytest.mark.parametrize("topk", [1, 130, 2048, None])
def test_any_number_of_rows_and_slots(portable, rows, slots, topk):
    Case(T=rows, S=slots, K=topk, portable=portable).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(512, 192, 64, 256), (36, 24, 8, 20), (16, 5, 4, 6)])
def test_any_sizes_and_dtype(dtype, sizes):
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    Case(T=70, S=200, K=40, dims=LayerDims(n_heads=1, **dict(zip(names, sizes))), dtype=dtype).check()


def test_padded_rows_and_any_lengths(portable):
    case = Case(B=4, portable=portable)
    ends = torch.tensor([0, 1, 64, 700], device=CUDA)[:, None] - torch.arange(150, device=CUDA).flip(0)
    case.visible = torch.stack([ends.clamp_min(0) // 3, ends], -1)[:, None].int()
    case.check()


def test_heads_in_groups_and_rows_in_parts_change_no_bit(portable, monkeypatch):
    case = Case(H=5, portable=portable)
    want = case.run()
    monkeypatch.setattr(configs, "heads_at_once", lambda *_: 2)
    assert torch.equal(case.run(), want)
    monkeypatch.setattr(configs, "BITS_BUDGET", 2 * 700 // 8 * 128)
    assert torch.equal(case.run(), want)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("place", [0, 512])
def test_a_bad_slot_reaches_the_rows_that_attend_to_it_alone(portable, bad, place):
    case = Case(portable=portable)
    clean = case.run()
    case.rows[1, 40, place] = bad
    hit = (case.picks[1] == 40).any(-1) & (case.visible[1, 0, :, 1] > 40)
    assert 0 < hit.sum() < 150
    dirty = case.run()
    assert dirty[1, hit].isnan().all()
    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[1, ~hit], clean[1, ~hit])


def test_nan_in_rows_that_see_nothing_reaches_nobody(portable):
    case = Case(portable=portable)
    want = case.run()
    case.visible[0, 0, 7] = 0
    case.q[0, :, 7] = NAN
    out = case.run()
    assert not out[0, 7].any()
    others = torch.arange(150, device=CUDA) != 7
    assert torch.equal(out[:, others], want[:, others])


def test_memory_around_the_output_stays(portable, monkeypatch):
    case, guarded = Case(T=131, portable=portable), []
    new_empty = torch.Tensor.new_empty

    def padded(self, *shape, dtype=None):
        if dtype is not None or len(shape) != 4:
            return new_empty(self, *shape, dtype=dtype or self.dtype)
        whole = torch.full((torch.Size(shape).numel() + 2048,), 7.5, dtype=self.dtype, device=self.device)
        guarded.append(whole)
        return whole[1024:-1024].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", padded)
    case.run()
    (whole,) = guarded
    assert (whole[:1024] == 7.5).all()
    assert (whole[-1024:] == 7.5).all()


def test_queries_need_no_order_in_memory(portable):
    case = Case(portable=portable)
    want = case.run()
    for q in (case.q.contiguous(), torch.nn.functional.pad(case.q, (1, 7))[..., 1:193]):
        case.q = q
        assert torch.equal(case.run(), want)


@pytest.mark.slow
def test_same_bits_on_a_thousand_runs(portable):
    case = Case(H=8, T=300, portable=portable)
    want = case.run()
    for _ in range(1000):
        assert torch.equal(case.run(), want)
