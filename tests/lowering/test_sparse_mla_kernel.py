"""The Triton kernel of ``dsa::sparse_mla`` on a GPU: hostile data, every shape, and bits that never change."""

import itertools

import pytest
import torch
from strategies import SELECTION_KINDS, causal, mask_of, selection_row

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.fp8_rows import pack, unpack
from dsa_compile.lowering.sparse_mla import configs, launch
from dsa_compile.lowering.sparse_mla.reference import sparse_mla

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
CUDA = torch.device("cuda")
NAN = float("nan")


class Case:
    """Inputs of one call. ``fp8``: the pool is bytes. ``page``: slots of a page, in shuffled pages."""

    def __init__(
        self, B=2, T=2, H=16, R=512, P=64, K=64, S=300, *, dtype=torch.bfloat16, fp8=False, page=0, seed=0, kinds=None
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, scale=1.0):
            return (torch.randn(shape, generator=generator) * scale).to(CUDA, dtype)

        self.q, self.q_pe = normal(B, T, H, R, scale=R**-0.5), normal(B, T, H, P, scale=P**-0.5)
        rows = normal(B, S, R + P)
        self.visible, self.scale, self.table = causal(B, T, S).to(CUDA), 1.0, None
        kinds = kinds or SELECTION_KINDS
        self.picks = None
        if K is not None:
            picked = [selection_row(kinds[i % len(kinds)], S, K, generator) for i in range(B * T)]
            self.picks = torch.stack(picked).view(B, T, K).to(CUDA)
        self.pool = pack(rows[..., :R], rows[..., R:]) if fp8 else rows
        self.values = unpack(self.pool, R, P, dtype) if fp8 else rows
        if page:
            self._page(page, generator)

    def _page(self, size, generator):
        B, S, width = self.pool.shape
        pages = -(-S // size)
        self.table = torch.randperm(B * pages + 3, generator=generator)[: B * pages].view(B, pages).int().to(CUDA)
        filler = 255 if self.pool.dtype == torch.uint8 else NAN  # as bytes: NaN in every e4m3, scale and bf16
        pool = torch.full((B * pages + 3, size, width), filler, dtype=self.pool.dtype, device=CUDA)
        for b, p in itertools.product(range(B), range(pages)):
            part = self.pool[b, p * size : (p + 1) * size]
            pool[self.table[b, p], : len(part)] = part
        self.pool = pool

    def run(self, **options):
        return torch.ops.dsa.sparse_mla(
            self.q, self.q_pe, self.pool, self.visible, None, self.picks, self.scale, block_table=self.table, **options
        )

    def exact(self):
        inputs = (self.q, self.q_pe, self.values)
        return sparse_mla(*(x.double() for x in inputs), self.visible, None, self.picks, self.scale)

    def eager(self):
        """The same attention as everyday torch code in the inputs' own dtype."""
        keep = mask_of(self.visible, self.values.shape[1])[:, 0]
        if self.picks is not None:
            S = self.values.shape[1]
            inside = torch.where((self.picks < 0) | (self.picks >= S), S, self.picks).long()
            chosen = torch.zeros(*keep.shape[:2], S + 1, dtype=torch.bool, device=CUDA).scatter(-1, inside, True)
            keep = keep & chosen[..., :S]
        logits = torch.einsum("bthd,bsd->bths", torch.cat([self.q, self.q_pe], -1), self.values) * self.scale
        probs = logits.masked_fill(~keep.unsqueeze(2), float("-inf")).softmax(-1).nan_to_num(0)
        return torch.einsum("bths,bsr->bthr", probs, self.values[..., : self.q.shape[-1]])

    def check(self):
        """Error against float64 within 1.1 times that of eager code, lse to float32, empty rows as promised."""
        (out, lse), (exact, exact_lse) = self.run(), self.exact()
        error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (out, self.eager()))
        # a float32 product runs through one sum of R + P terms; eager code sums in blocks
        rounding = self.pool.shape[-1] ** 0.5 * 2**-24 if self.q.dtype == torch.float32 else 0
        assert error <= 1.1 * allowed + rounding
        empty = exact_lse.isneginf()
        assert torch.equal(lse.isneginf(), empty)
        assert not out[empty].any()
        torch.testing.assert_close(lse[~empty].double(), exact_lse[~empty], atol=2e-5, rtol=1e-6)


@pytest.fixture(autouse=True)
def _no_refusals(recwarn):
    """Every call of this file is served by the kernel."""
    yield
    assert not [w for w in recwarn if "runs as its reference" in str(w.message)]


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 22, 64, 96, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_any_number_of_heads(heads, fp8):
    Case(H=heads, B=3, T=3, K=130, fp8=fp8).check()


@pytest.mark.parametrize("topk", [1, 33, 100, 512, 2048, 4096, None])
@pytest.mark.parametrize("heads", [16, 128])
def test_any_width_of_selection(topk, heads):
    Case(H=heads, K=topk, S=5000, B=3, T=3).check()


@pytest.mark.parametrize(
    ("rank", "rope"), [(32, 8), (36, 16), (48, 24), (64, 8), (128, 32), (256, 64), (512, 64), (512, 8)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
def test_any_latent_width_and_dtype(rank, rope, dtype, fp8):
    Case(H=4, R=rank, P=rope, K=40, S=90, dtype=dtype, fp8=fp8).check()


@pytest.mark.parametrize("page", [1, 16, 61, 64, 128, 300])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("topk", [70, None])
def test_pages_change_no_bit(page, fp8, topk):
    flat, paged, other = (Case(H=64, K=topk, fp8=fp8, page=p) for p in (0, page, page))
    order = torch.randperm(other.pool.shape[0], generator=torch.Generator().manual_seed(5)).to(CUDA)
    other.pool, other.table = other.pool[order], order.argsort()[other.table.long()].int()
    paged.check()
    for a, b, c in zip(flat.run(), paged.run(), other.run()):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_absent_pages_are_not_selected():
    case = Case(H=16, K=200, page=16)
    case.table[0, 3], case.table[1, 0] = -1, 10**6
    gone = torch.zeros(2, 1, 300, dtype=torch.bool, device=CUDA)
    gone[0, :, 48:64] = gone[1, :, :16] = True
    inside = case.picks.clamp(0, 299).long()
    out, lse = case.run()
    case.picks = case.picks.masked_fill(gone.expand(2, 2, 300).gather(-1, inside), -1)
    exact, exact_lse = case.exact()
    assert (out.double() - exact).norm() <= 0.01 * exact.norm()
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 300])
@pytest.mark.parametrize("fp8", [False, True])
def test_any_number_of_query_rows_and_any_mixture_of_lengths(rows, fp8):
    case = Case(B=4, T=rows, H=32, K=64, S=500, fp8=fp8)
    ends = torch.tensor([0, 1, 64, 500], device=CUDA)[:, None] - torch.arange(rows, device=CUDA).flip(0)
    case.visible = torch.stack([torch.zeros_like(ends), ends.clamp_min(0)], -1)[:, None].int()
    case.check()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_indices_outside_and_unselected_nan_do_nothing(fp8, heads):
    case = Case(B=2, T=8, H=heads, K=160, S=400, fp8=fp8, kinds=("outside", "leading", "none", "last", "holes"))
    used = torch.zeros(2, 401, dtype=torch.bool, device=CUDA)
    seen = case.picks.masked_fill((case.picks < 0) | (case.picks >= case.visible[:, 0, :, 1:]), 400)
    used.scatter_(1, seen.flatten(1).long(), True)
    before = case.run()
    case.pool.masked_fill_(~used[:, :400, None], 255 if fp8 else NAN)
    for a, b in zip(before, case.run()):
        assert torch.equal(a, b)
    case.check() if not case.values.isnan().any() else None


def test_a_selected_nan_reaches_its_rows_alone():
    case = Case(B=2, T=8, H=64, K=64)
    clean = case.run()
    case.pool[1, 40, 5] = NAN
    hit = (case.picks[1] == 40).any(-1) & (case.visible[1, 0, :, 1] > 40)
    assert 0 < hit.sum() < 8
    for before, after in zip(clean, case.run()):
        assert after[1, hit].isnan().all()
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[1, ~hit], before[1, ~hit])


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("fp8", [False, True])
def test_memory_around_the_outputs_stays(splits, fp8, monkeypatch):
    case, guarded = Case(H=22, K=100, fp8=fp8), []

    def new_empty(self, *shape, dtype=None):
        size = torch.Size(shape).numel()
        whole = torch.full((size + 2048,), 7.5, dtype=dtype or self.dtype, device=self.device)
        guarded.append(whole)
        return whole[1024:-1024].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    call = launch.call_of(case.q, case.q_pe, case.pool, None, case.picks, None)
    device = Device.of(CUDA)
    for config in configs.configs(call, device):
        launch.launch(case.q, case.q_pe, case.pool, case.visible, case.picks, 1.0, None, config, device, splits)
    assert len(guarded) >= 2
    for whole in guarded:
        assert (whole[:1024] == 7.5).all()
        assert (whole[-1024:] == 7.5).all()


@pytest.mark.parametrize("heads", [16, 128])
def test_every_split_says_the_same(heads):
    case = Case(B=1, T=1, H=heads, K=512, S=600)
    call, device = launch.call_of(case.q, case.q_pe, case.pool, None, case.picks, None), Device.of(CUDA)
    exact, exact_lse = case.exact()
    allowed = (case.eager().double() - exact).norm()
    for config, splits in itertools.product(configs.configs(call, device), (1, 2, 3, 7, 8)):
        out, lse = launch.launch(
            case.q, case.q_pe, case.pool, case.visible, case.picks, 1.0, None, config, device, splits
        )
        assert (out.double() - exact).norm() <= 1.1 * allowed
        torch.testing.assert_close(lse.double(), exact_lse, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("fp8", [False, True])
def test_same_bits_on_a_hundred_runs_and_in_any_batch_order(rows, fp8):
    case = Case(B=5, T=rows, H=128, K=512, S=700, fp8=fp8)
    first = case.run()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, case.run()))
    order = torch.tensor([3, 0, 4, 2, 1], device=CUDA)
    for name in ("q", "q_pe", "pool", "visible", "picks"):
        setattr(case, name, getattr(case, name)[order])
    assert all(torch.equal(a[order], b) for a, b in zip(first, case.run()))


def test_queries_need_no_order_in_memory():
    case = Case(H=16)
    want = case.run()
    case.q = case.q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    case.q_pe = case.q_pe.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(torch.equal(a, b) for a, b in zip(want, case.run()))


def test_pools_beyond_two_gigabytes():
    slots = 2**31 // 576 // 2 + 5000
    case = Case(B=1, H=16, K=64, S=300)
    case.pool = torch.zeros(2, slots, 576, dtype=torch.bfloat16, device=CUDA)
    case.q, case.q_pe, case.picks = (x.repeat(2, 1, 1, *[1] * (x.dim() - 3)) for x in (case.q, case.q_pe, case.picks))
    far = slots - 300
    case.pool[:, far:] = case.values
    case.visible = torch.tensor([0, slots], dtype=torch.int32, device=CUDA).expand(2, 1, 2, 2).contiguous()
    case.picks = torch.where((case.picks >= 0) & (case.picks < 300), case.picks + far, case.picks.clamp_max(-1))
    small = Case(B=1, H=16, K=64, S=300)
    small.visible = torch.tensor([0, 300], dtype=torch.int32, device=CUDA).expand(1, 1, 2, 2).contiguous()
    for a, b in zip(case.run(), small.run()):
        assert torch.equal(a[1:], b)
