"""The Triton kernels of ``dsa::select`` on a GPU: hostile data, every shape, the budget, and bits that never change."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import causal, seeds

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.fp8_keys import quantise
from dsa_compile.lowering.select import launch
from dsa_compile.lowering.select.reference import index_scores, select
from dsa_compile.lowering.select.topk import most_scratch_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
CUDA = torch.device("cuda")
BUDGET = 256 << 20
SCALE = 0.125


class Case:
    """Inputs of one call, small integers by default: every score is exact, in fp8 too, and most are tied.

    ``page``: slots of a page, in shuffled pages among NaN.
    """

    def __init__(
        self,
        B=2,
        T=3,
        HI=8,
        DI=64,
        K=16,
        S=300,
        *,
        dtype=torch.bfloat16,
        fp8=True,
        page=0,
        seed=0,
        whole=True,
        ends=None,
    ):
        generator = torch.Generator(CUDA).manual_seed(seed)

        def values(*shape):
            if whole:
                return torch.randint(-4, 5, shape, generator=generator, device=CUDA).to(dtype)
            return torch.randn(shape, generator=generator, device=CUDA).to(dtype)

        self.q, self.keys, self.K = values(B, T, HI, DI), values(B, S, DI), K
        self.weights = values(B, T, HI).float() / 4
        self.visible = causal(B, T, S).to(CUDA)
        if ends is not None:
            self.visible[..., 1] = torch.tensor(ends, device=CUDA).int()
        self.scales = self.table = None
        if fp8:
            self.keys, self.scales = quantise(self.keys)
        self.flat = self.keys, self.scales
        if page:
            self._page(page, generator)

    def _page(self, size, generator):
        B, S, _ = self.keys.shape
        pages = -(-S // size)
        order = torch.randperm(B * pages + 3, generator=generator, device=CUDA)
        self.table = order[: B * pages].view(B, pages).int()

        def paged(x):
            pool = x.new_full((B * pages + 3, size, *x.shape[2:]), 255 if x.dtype == torch.uint8 else float("nan"))
            for b, p in itertools.product(range(B), range(pages)):
                part = x[b, p * size : (p + 1) * size]
                pool[self.table[b, p], : len(part)] = part
            return pool

        self.keys, self.scales = paged(self.keys), None if self.scales is None else paged(self.scales)

    def run(self, budget=BUDGET):
        return torch.ops.dsa.select(
            self.q, self.weights, self.keys, self.visible, None, self.K, SCALE, budget, self.table, self.scales
        )

    def want(self):
        keys, scales = self.flat
        keys = keys if scales is not None else keys.double()
        inputs = self.q.double(), self.weights.double(), keys, self.visible
        return select(*inputs, None, self.K, SCALE, BUDGET, None, scales)

    def check(self, budget=BUDGET):
        assert torch.equal(self.run(budget), self.want())


@pytest.fixture(autouse=True)
def _no_refusals(recwarn):
    """Every call of this file is served by the kernels."""
    yield
    assert not [w for w in recwarn if "runs as its reference" in str(w.message)]


@pytest.mark.parametrize("heads", [1, 4, 8, 22, 32, 64, 128])
@pytest.mark.parametrize("dim", [16, 48, 64, 128])
@pytest.mark.parametrize("fp8", [True, False])
def test_any_index_heads_and_widths(heads, dim, fp8):
    for T in (1, 4):
        Case(HI=heads, DI=dim, T=T, fp8=fp8).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", [True, False])
def test_any_dtype_of_queries(dtype, fp8):
    Case(dtype=dtype, fp8=fp8).check()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("rows_at_once", [1, 2, 7, 1000])
def test_chunks_of_any_number_of_rows_select_the_same(rows, rows_at_once):
    scratch = most_scratch_bytes(300, 40, Device.of(CUDA).processors)
    Case(B=3, T=rows, HI=32, K=40).check(budget=scratch + rows_at_once * 1200)


@pytest.mark.parametrize("page", [1, 16, 61, 64, 128, 300])
@pytest.mark.parametrize("fp8", [True, False])
def test_pages_change_no_pick(page, fp8):
    Case(fp8=fp8, page=page).check()


@pytest.mark.parametrize("topk", [1, 33, 512, 2048, 4096])
def test_around_k_visible_slots(topk):
    ends = [topk - 1, topk, topk + 1, 0, 1, topk + 700]
    Case(B=1, T=6, S=topk + 700, K=topk, ends=ends).check()


def test_ranges_may_begin_anywhere_and_lie_outside():
    case = Case(T=5)
    case.visible[:, 0] = torch.tensor([[7, 250], [-5, 300], [130, 1000], [9, 3], [299, 300]], device=CUDA).int()
    got = case.run()
    case.visible = case.visible.clamp(0, 300)
    assert torch.equal(got, case.want())


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("page", [0, 16])
def test_nan_where_nobody_looks_changes_no_pick(fp8, page):
    clean, dirty = (Case(fp8=fp8, T=1, ends=[200]) for _ in range(2))
    keys, scales = dirty.flat
    keys[:, 200:] = 255 if fp8 else float("nan")
    if fp8:
        scales[:, 200:] = float("nan")
    if page:
        dirty._page(page, torch.Generator(CUDA).manual_seed(1))
    assert torch.equal(dirty.run(), clean.run())


def test_a_visible_key_of_nan_loses_to_every_number():
    for fp8 in (True, False):
        case = Case(T=1, K=290, fp8=fp8)
        if fp8:
            case.scales[:, 40:45] = float("nan")
        else:
            case.keys[:, 40:45, 3] = float("nan")
        case.check()
        assert not torch.isin(case.run(), torch.arange(40, 45, device=CUDA)).any()


@pytest.mark.parametrize("infinity", [float("inf"), -float("inf")])
@pytest.mark.parametrize("heads", [8, 5])
def test_infinite_keys_score_as_in_the_reference(infinity, heads):
    case = Case(T=1, HI=heads, fp8=False)
    case.keys[:, 17, 2] = infinity
    case.check()


@pytest.mark.parametrize(("fp8", "bound"), [(True, 1e-3), (False, 2e-6)])
@pytest.mark.parametrize("rows", [1, 64])
def test_scores_are_those_of_float64(fp8, bound, rows):
    """Products of fp8 sum up in about 14 bits; those of 16-bit values in float32."""
    case = Case(B=2, T=rows, HI=64, DI=128, S=1000, fp8=fp8, whole=False)
    call = launch.call_of(case.q, case.keys, None, None)
    ((_, options),) = launch.launches(call, Device.of(CUDA), 1 << 20)
    memory = torch.full((2 * rows + 2, 1004), 7.25, device=CUDA)
    inputs = case.q, case.weights, case.keys, case.visible.view(-1, 2), 0, SCALE, None, case.scales
    launch.score(memory[1:-1, :1000], *inputs, **options)
    exact = index_scores(
        case.q.double(), case.weights.double(), case.keys if fp8 else case.keys.double(), SCALE, case.scales
    ).flatten(0, 1)
    seen = torch.arange(1000, device=CUDA) < case.visible.view(-1, 2)[:, 1:]
    error = (memory[1:-1, :1000] - exact).abs() / exact.abs().amax(-1, keepdim=True)
    assert error[seen].max() <= bound
    memory[1:-1, :1000].masked_fill_(seen, 7.25)
    assert (memory == 7.25).all()


def test_every_run_and_every_order_of_sequences_gives_the_same_bits():
    case = Case(B=8, T=2, HI=64, DI=128, K=100, S=3000, whole=False)
    first = case.run()
    assert all(torch.equal(case.run(), first) for _ in range(100))
    order = torch.randperm(8, device=CUDA)
    for name in ("q", "weights", "keys", "scales", "visible"):
        setattr(case, name, getattr(case, name)[order])
    assert torch.equal(case.run(), first[order])


def test_a_cuda_graph_follows_lengths_that_change_on_the_device():
    case = Case(B=2, T=1, S=5000, K=64)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    for end in (0, 1, 63, 64, 65, 4999, 5000):
        case.visible[..., 1] = end
        graph.replay()
        assert torch.equal(out, case.want())


@pytest.mark.parametrize(("rows", "slots"), [(4096, 131072), (2048, 1048576)])
def test_a_long_prefill_stays_within_its_budget_and_selects_right(rows, slots):
    case = Case(B=1, T=rows, HI=64, DI=128, K=2048, S=slots, whole=False)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    picks = case.run()
    extra = torch.cuda.max_memory_allocated() - before - picks.nbytes
    assert extra <= 1.1 * BUDGET
    for row in (0, 1, rows // 2, rows - 1):
        scores = index_scores(
            case.q[:, row : row + 1].double(), case.weights[:, row : row + 1], case.keys, SCALE, case.scales
        )[0, 0, : int(case.visible[0, 0, row, 1])]
        bar = scores.topk(2048).values[-1]
        slack = 1e-3 * scores.abs().max()
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen[picks[0, row].long()] = True
        assert chosen.sum() == 2048
        assert (picks[0, row].diff() > 0).all()
        assert (scores[chosen] >= bar - slack).all()
        assert (scores[~chosen] <= bar + slack).all()


@given(
    seed=seeds,
    batch=st.integers(1, 3),
    rows=st.integers(1, 9),
    heads=st.integers(1, 70),
    dim=st.sampled_from([16, 32, 80, 128]),
    slots=st.integers(1, 700),
    topk=st.integers(1, 300),
    fp8=st.booleans(),
    page=st.sampled_from([0, 16, 61]),
)
def test_any_call_selects_as_the_reference(seed, batch, rows, heads, dim, slots, topk, fp8, page):
    Case(batch, rows, heads, dim, topk, slots, fp8=fp8, page=page, seed=seed).check()


def test_what_no_kernel_serves_is_served_by_the_reference_which_says_so():
    case = Case(dtype=torch.float64, fp8=False)
    with pytest.warns(UserWarning, match="float32 at most"):
        assert torch.equal(case.run(), case.want())
