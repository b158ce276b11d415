"""Few rows times weights are what linear layers make of it, to the rounding of its dtype."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from dsa_compile import lowering  # noqa: F401 (registers the ops)
from dsa_compile.errors import InputError
from dsa_compile.lowering.row_products.launch import config
from dsa_compile.lowering.row_products.limits import MOST_ROWS, MOST_WEIGHTS

ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
dtypes = st.sampled_from(list(ROUNDING))


def normal(*shape, device, dtype):
    return torch.randn(*shape, device=device).to(dtype)


def far(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@given(
    rows=st.integers(1, MOST_ROWS),
    sizes=st.lists(st.sampled_from([1, 2, 3, 64, 577]), min_size=1, max_size=MOST_WEIGHTS),
    K=st.sampled_from([1, 7, 128, 511, 512, 513, 1536, 4096, 5000]),
    dtype=dtypes,
    exact=st.booleans(),
    seed=seeds,
)
def test_layers_one_behind_the_other(device, rows, sizes, K, dtype, exact, seed):
    torch.manual_seed(seed)
    x = normal(rows, K, device=device, dtype=dtype)
    weights = [normal(N, K, device=device, dtype=dtype) for N in sizes]
    wanted = torch.float32 if exact else dtype
    got = torch.ops.dsa.row_products(x, weights, wanted)
    assert (got.shape, got.dtype) == ((rows * sum(sizes),), wanted)
    want = torch.cat([F.linear(x.double(), w.double()).flatten() for w in weights])
    assert far(got, want) <= max(ROUNDING[wanted], 1e-14)


@given(
    rows=st.integers(2, MOST_ROWS),
    heads=st.sampled_from([2, 3, 40]),
    part=st.sampled_from([1, 16, 24, 128]),
    steps=st.booleans(),
    dtype=dtypes,
    seed=seeds,
)
def test_rows_that_lie_in_parts(device, rows, heads, part, steps, dtype, seed):
    """As a product by head leaves them, of sequences or of steps."""
    torch.manual_seed(seed)
    weight = normal(7, heads * part, device=device, dtype=dtype)
    x = normal(heads, rows, part, device=device, dtype=dtype).transpose(0, 1)
    x = x if steps else x.contiguous()
    want = F.linear(x.flatten(1).double(), weight.double()).flatten()
    assert far(torch.ops.dsa.row_products(x, [weight]), want) <= ROUNDING[dtype]


@given(
    rows=st.integers(1, 4),
    each=st.integers(1, 3),
    K=st.sampled_from([5, 512, 513, 4096, 4100]),
    dtype=dtypes,
    seed=seeds,
)
def test_each_pick_by_its_own_expert(device, rows, each, K, dtype, seed):
    torch.manual_seed(seed)
    E, N, P = 3, 9, rows * each
    x, weights = normal(rows, K, device=device, dtype=dtype), normal(E, N, K, device=device, dtype=dtype)
    picks = torch.randint(E, (P,), device=device)
    got = torch.ops.dsa.expert_products(x, weights, picks)
    assert (got.shape, got.dtype) == ((P, N), dtype)
    want = torch.stack([weights[e].double() @ x.double()[p // each] for p, e in enumerate(picks)])
    assert far(got, want) <= ROUNDING[dtype]


def test_a_pick_from_outside_gives_zeros(device):
    x, weights = torch.randn(1, 8, device=device), torch.full((2, 4, 8), float("nan"), device=device)
    weights[1] = 1
    got = torch.ops.dsa.expert_products(x, weights, torch.tensor([-1, 1, 2, 1 << 40], device=device))
    assert (got[[0, 2, 3]] == 0).all()
    torch.testing.assert_close(got[1], x.sum().expand(4))


def test_nan_of_one_weight_stays_in_its_outputs(device):
    x, weight = torch.randn(1, 600, device=device), torch.randn(6, 600, device=device)
    weight[3, 599] = float("nan")
    got = torch.ops.dsa.row_products(x, [weight, weight[:2].contiguous()])
    assert got.isnan().nonzero().tolist() == [[3]]


def test_strided_inputs(device):
    x, weight = torch.randn(40, 1, device=device).T, torch.randn(40, 12, device=device).T
    torch.testing.assert_close(torch.ops.dsa.row_products(x, [weight[::2]]), F.linear(x, weight[::2])[0])


def test_opcheck(device):
    x, weights = torch.randn(2, 32, device=device).half(), [torch.randn(n, 32, device=device).half() for n in (3, 5)]
    for dtype in (None, torch.float32):
        torch.library.opcheck(torch.ops.dsa.row_products.default, (x, weights, dtype))
    experts, picks = torch.randn(4, 6, 32, device=device), torch.tensor([3, 0], device=device)
    torch.library.opcheck(torch.ops.dsa.expert_products.default, (x.float(), experts, picks))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_graph_of_dependent_launches_gives_the_bits_of_single_ones(device, rows):
    """In a capture a kernel asks for weights while the one before, which makes its row, still runs."""
    weights = [torch.randn(4096, 4096, device=device).bfloat16() / 64 for _ in range(8)]
    experts, picks = torch.randn(4, 4096, 4096, device=device).bfloat16() / 64, torch.tensor([2] * rows, device=device)
    first = torch.randn(rows, 4096, device=device).bfloat16()

    def chain(x):
        for weight in weights:
            x = torch.ops.dsa.row_products(x, [weight, weight[:8]])[: rows * 4096].view(rows, -1)
            x = torch.ops.dsa.expert_products(x, experts, picks).tanh()
        return x

    x = first.clone()
    want = chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    for seed in range(200):
        torch.manual_seed(seed)
        x.copy_(torch.randn(rows, 4096, device=device) if seed else first)
        graph.replay()
        if seed % 20 == 0:
            assert torch.equal(got, chain(x) if seed else want)


@pytest.mark.parametrize("K", [64, 1536, 7168])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, MOST_ROWS])
def test_a_thread_loads_sixteen_bytes(K, itemsize, rows):
    tile = config(K, itemsize, rows)
    assert tile.block_n * tile.block_k * itemsize % (tile.num_warps * 32 * 16) == 0


def row(K=8, rows=1, **kind):
    return torch.zeros(rows, K, **kind)


@pytest.mark.parametrize(
    ("x", "weights", "dtype", "message"),
    [
        (row(rows=5), [row()], None, r"row_products: expected x\[R, K\] or .* of 1 to 4 rows, came \[5, 8\]"),
        (row()[0], [row()], None, r"came \[8\]"),
        (row(), [], None, "expected 1 to 4 weights, came 0"),
        (row(), [row()] * 5, None, "expected 1 to 4 weights, came 5"),
        (row(), [row(), row(9)], None, r"expected weights\[1\] \[N, 8\]"),
        (row(), [row(dtype=torch.bfloat16)], None, r"expected weights\[0\] in torch.float32 on cpu as x"),
        (row(), [row()], torch.bfloat16, "expected dtype torch.float32 as x or torch.float32, came torch.bfloat16"),
    ],
)
def test_bad_rows_are_refused_at_capture(x, weights, dtype, message):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InputError, match=message):
        torch.ops.dsa.row_products(x, weights, dtype)


@pytest.mark.parametrize(
    ("x", "weights", "picks", "message"),
    [
        (
            row(),
            torch.zeros(2, 4, 9),
            torch.zeros(1).long(),
            r"expected x\[P, K\] and weights\[E, N, K\], came \[1, 8\]",
        ),
        (torch.zeros(2, 8), torch.zeros(2, 4, 8), torch.zeros(3).long(), r"expected picks\[P\] of integers"),
        (row(), torch.zeros(2, 4, 8), torch.zeros(3), "came \\[3\\] of torch.float32"),
        (row(), torch.zeros(2, 4, 8).half(), torch.zeros(3).long(), "expected weights in torch.float32"),
    ],
)
def test_bad_experts_are_refused_at_capture(x, weights, picks, message):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InputError, match=message):
        torch.ops.dsa.expert_products(x, weights, picks)
