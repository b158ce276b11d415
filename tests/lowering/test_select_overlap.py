"""``dsa::select`` in two halves is ``dsa::select``, however late its stream is."""

import pytest
import torch
from strategies import causal

from dsa_compile.lowering.select_overlap import streams

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
SLOTS, K = 3000, 100


def arguments(device, rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    visible = causal(2, rows, SLOTS).to(device)
    return normal(2, rows, 8, 32), normal(2, rows, 8), normal(2, SLOTS, 32), visible, None, K, 0.3, 1 << 28


def halves(*inputs):
    picks = torch.ops.dsa.select_start(*inputs)
    other = inputs[0] @ inputs[0].mT
    torch.ops.dsa.select_wait(picks, [x for x in inputs if isinstance(x, torch.Tensor)])
    return picks, other


def late(monkeypatch):
    """Every start finds its stream busy for some milliseconds."""
    side_stream = streams.side_stream

    def busy(device):
        side = side_stream(device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
        return side

    monkeypatch.setattr(streams, "side_stream", busy)


def test_both_halves_are_the_whole(device):
    inputs = arguments(device)
    assert torch.equal(halves(*inputs)[0], torch.ops.dsa.select(*inputs))


def test_opcheck(device):
    inputs = arguments(device)
    torch.library.opcheck(torch.ops.dsa.select_start.default, inputs)
    torch.ops.dsa.select_wait(torch.ops.dsa.select_start(*inputs), [])


def test_opcheck_of_the_wait():
    """On the CPU, where it may be given the copies that this check makes."""
    picks = torch.ops.dsa.select_start(*arguments("cpu"))
    tests = ["test_schema", "test_faketensor"]
    torch.library.opcheck(torch.ops.dsa.select_wait.default, (picks, []), test_utils=tests)


def test_compiled_halves_copy_nothing_before_the_wait(device):
    inputs = arguments(device)
    torch._dynamo.reset()
    compiled = torch.compile(halves, fullgraph=True)
    assert torch.equal(compiled(*inputs)[0], torch.ops.dsa.select(*inputs))


@on_a_gpu
@pytest.mark.parametrize("mode", ["eager", "inductor", "reduce-overhead", "graph"])
def test_a_late_stream_gives_the_same_bits(mode, device, monkeypatch):
    inputs = arguments(device)
    want = torch.ops.dsa.select(*inputs)
    late(monkeypatch)
    torch._dynamo.reset()
    if mode in ("inductor", "reduce-overhead"):
        run = torch.compile(halves, fullgraph=True, mode=None if mode == "inductor" else mode)
        results = [run(*inputs)[0].clone() for _ in range(5)]
    elif mode == "graph":
        halves(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            picks, _ = halves(*inputs)
        results = []
        for _ in range(5):
            graph.replay()
            results.append(picks.clone())
    else:
        results = [halves(*inputs)[0] for _ in range(5)]
    assert all(torch.equal(x, want) for x in results)


@on_a_gpu
def test_a_copy_of_what_is_not_there_yet_is_an_error(device):
    inputs = arguments(device)
    picks = torch.ops.dsa.select_start(*inputs)
    with pytest.raises(RuntimeError, match="another, a copy"):
        torch.ops.dsa.select_wait(picks.clone(), [])
    torch.ops.dsa.select_wait(picks, [])
