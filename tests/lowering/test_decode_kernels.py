"""The kernels of a decode step on a GPU: bits that never change, and an end whatever the input."""

import subprocess
import sys

import pytest
import test_select_kernel
import test_sparse_mla_kernel
import torch
from hostile_scores import hostile

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.select import launch
from dsa_compile.lowering.select.topk import topk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
RUNS = 1000
SECONDS = 240
"""After which a process counts as hung: compiling takes most of what it needs."""


def same(run):
    """Every run gives the bits of the first; NaN equals nothing, so these are compared as integers."""
    first = [x.view(torch.int16) for x in run()]
    assert all(torch.equal(x.view(torch.int16), want) for _ in range(RUNS) for x, want in zip(run(), first))


@pytest.mark.parametrize(("batch", "heads"), [(1, 128), (8, 128), (1, 16), (8, 16), (64, 16)])
@pytest.mark.parametrize("fp8", [False, True])
def test_attention_has_the_same_bits_on_a_thousand_runs(batch, heads, fp8):
    """Whole rows and split ones, on Hopper by either of its kernels."""
    same(test_sparse_mla_kernel.Case(B=batch, T=1, H=heads, K=1000, S=1500, fp8=fp8).run)


@pytest.mark.parametrize(("batch", "slots"), [(1, 32768), (8, 3000)])
@pytest.mark.parametrize("fp8", [False, True])
def test_scores_have_the_same_bits_on_a_thousand_runs(batch, slots, fp8):
    case = test_select_kernel.Case(B=batch, T=1, HI=64, DI=128, S=slots, fp8=fp8, whole=False)
    ((_, options),) = launch.launches(launch.call_of(case.q, case.keys, None, None), Device.of(case.q.device), batch)

    def run():
        scores = torch.full((batch, slots), float("nan"), device=case.q.device)
        inputs = case.q, case.weights, case.keys, case.visible.view(-1, 2), 0, test_select_kernel.SCALE
        launch.score(scores, *inputs, None, case.scales, **options)
        return (scores,)

    same(run)


@pytest.mark.parametrize("rows", [1, 22, 300])
def test_topk_has_the_same_bits_on_a_thousand_runs(rows):
    scores = hostile(50000).repeat(14, 1)[:rows].cuda()
    visible = torch.tensor([0, 50000], device=scores.device).int().repeat(rows, 1)
    same(lambda: (topk(scores, visible, 2048),))


ATTENTION = """
for heads, K, slots, filler in itertools.product((16, 128), (130, 2048), (1, 300), (0.0, NAN, INF)):
    q, q_pe = (torch.full((8, 1, heads, n), filler, dtype=torch.bfloat16, device=CUDA) for n in (512, 64))
    rows = torch.full((8, slots, 576), filler, dtype=torch.bfloat16, device=CUDA)
    codes = torch.full((8, slots, 656), 0 if filler == 0 else 255, dtype=torch.uint8, device=CUDA)
    for picks in (
        torch.full((8, 1, K), -1, **int32),
        torch.full((8, 1, K), 2**31 - 1, **int32),
        torch.zeros(8, 1, K, **int32),
        torch.randint(-(2**31), 2**31 - 1, (8, 1, K), **int32),
        torch.randint(-2, slots + 2, (8, 1, K), **int32),
    ):
        for visible, pool in itertools.product(ranges(8, slots), (rows, codes)):
            torch.ops.dsa.sparse_mla(q, q_pe, pool, visible, None, picks, 1.0)
"""
SELECT = """
for slots, K, filler, fp8 in itertools.product((1, 300, 40000), (16, 2048), (0.0, NAN, INF), (False, True)):
    q = torch.full((8, 1, 64, 128), filler, dtype=torch.bfloat16, device=CUDA)
    weights = torch.full((8, 1, 64), filler, device=CUDA)
    keys = torch.full((8, slots, 128), filler, dtype=torch.bfloat16, device=CUDA)
    scales = torch.full((8, slots), filler, device=CUDA) if fp8 else None
    keys = torch.randint(256, keys.shape, dtype=torch.uint8, device=CUDA) if fp8 else keys
    for visible in ranges(8, slots):
        torch.ops.dsa.select(q, weights, keys, visible, None, K, 1.0, 256 << 20, None, scales)
"""
TOPK = """
from dsa_compile.lowering.select.topk import topk

for slots, rows, K in itertools.product((1, 5000, 140000), (1, 300), (1, 2048, 8192)):
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, slots), **int32).view(torch.float32)
    for scores in (bits, *(torch.full((rows, slots), x, device=CUDA) for x in (0.0, NAN, INF, -INF))):
        for visible in ranges(rows, slots):
            topk(scores, visible.view(-1, 2), K)
"""
PROGRAM = """
import itertools
import torch
from dsa_compile import lowering

CUDA, NAN, INF = "cuda", float("nan"), float("inf")
int32 = {{"dtype": torch.int32, "device": CUDA}}
torch.manual_seed(0)


def ranges(rows, slots):
    for span in ((0, 0), (0, -5), (0, slots), (0, 2**31 - 1), (-(2**31), 2**31 - 1), (2**31 - 1, -(2**31))):
        yield torch.tensor(span, **int32).repeat(rows, 1, 1, 1)

{calls}
torch.cuda.synchronize()
print("ended")
"""


@pytest.mark.parametrize("calls", [ATTENTION, SELECT, TOPK], ids=["attention", "select", "topk"])
def test_no_input_hangs_it(calls):
    """In a process of its own, which can be killed while a kernel waits for what never comes."""
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(calls=calls)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "ended\n", done.stderr
