"""``dsa::select`` in two halves is ``dsa::select``, however late its stream is."""

import copy

import pytest
import torch
from strategies import causal
from torch import nn
from torch.fx import symbolic_trace

from dsa_compile import programs
from dsa_compile.lowering.select_overlap import streams

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
SLOTS, K = 3000, 100


class Program(nn.Module):
    """Write the keys of the new tokens, then select."""

    def forward(self, pool, q, key, slots, weights, visible):
        torch.ops.dsa.cache_write.default(pool[..., :0], pool, slots, None, None, key)
        return (torch.ops.dsa.select.default(q, weights, pool, visible, None, K, 0.3, 1 << 28),)


def arguments(device, rows=1, seed=0):
    """Of ``dsa::select_start``, but for the name of `Program` and K."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    slots = torch.arange(SLOTS - rows, SLOTS, device=device).expand(2, rows).contiguous()
    visible = causal(2, rows, SLOTS).to(device)
    pool, q = normal(2, SLOTS, 32), normal(2, rows, 8, 32)
    return [pool], q, [normal(2, rows, 32), slots, normal(2, rows, 8), visible]


def named(writes, gate, reads):
    taken = [*writes, gate, *reads]
    return writes, gate, reads, programs.register(symbolic_trace(Program()), taken, "eager"), K


def whole(writes, gate, reads):
    """What the program returns, and the pool that it leaves."""
    (pool,) = copy.deepcopy(writes)
    return Program()(pool, gate, *reads)[0], pool


def halves(writes, gate, reads, program, index_topk):
    picks = torch.ops.dsa.select_start(writes, gate, reads, program, index_topk)
    other = gate @ gate.mT
    torch.ops.dsa.select_wait(picks, other, [gate])
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
    picks, pool = whole(*inputs)
    assert torch.equal(halves(*named(*inputs))[0], picks)
    assert torch.equal(inputs[0][0], pool)


def test_opcheck():
    """On the CPU, where the wait may be given the copies that this check makes."""
    inputs = named(*arguments("cpu"))
    tests = ["test_schema", "test_faketensor"]
    torch.library.opcheck(torch.ops.dsa.select_start.default, inputs, test_utils=tests)
    picks = torch.ops.dsa.select_start(*inputs)
    torch.library.opcheck(torch.ops.dsa.select_wait.default, (picks, inputs[1], []), test_utils=tests)


def test_a_program_that_nobody_registered_is_named():
    writes, gate, reads = arguments("cpu")
    with pytest.raises(RuntimeError, match="registered in this process, came 'unknown'"):
        torch.ops.dsa.select_start(writes, gate, reads, "unknown", K)


def test_programs_share_a_name_when_text_and_kinds_of_inputs_are_the_same():
    inputs = [named(*arguments("cpu", seed=seed))[3] for seed in (0, 1)]
    assert inputs[0] == inputs[1] != named(*arguments("cpu", rows=2))[3]


def test_compiled_halves_copy_nothing_before_the_wait(device):
    inputs = arguments(device)
    picks, pool = whole(*inputs)
    torch._dynamo.reset()
    compiled = torch.compile(halves, fullgraph=True)
    assert torch.equal(compiled(*named(*inputs))[0], picks)
    assert torch.equal(inputs[0][0], pool)


@on_a_gpu
@pytest.mark.parametrize("mode", ["eager", "inductor", "reduce-overhead", "graph"])
def test_a_late_stream_gives_the_same_bits(mode, device, monkeypatch):
    inputs = named(*arguments(device))
    want, _ = whole(*inputs[:3])
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
def test_in_turn_waits_for_nothing_on_another_stream(device):
    inputs = named(*arguments(device))
    want, _ = whole(*inputs[:3])
    with streams.in_turn():
        assert torch.equal(torch.ops.dsa.select_start(*inputs), want)
    assert streams.side_stream(want.device) != torch.cuda.current_stream()
    torch.ops.dsa.select_wait(*started(inputs))


def started(inputs):
    picks = torch.ops.dsa.select_start(*inputs)
    return picks, inputs[1], []


@on_a_gpu
def test_a_copy_of_what_is_not_there_yet_is_an_error(device):
    picks, gate, _ = started(named(*arguments(device)))
    with pytest.raises(RuntimeError, match="another, a copy"):
        torch.ops.dsa.select_wait(picks.clone(), gate, [])
    torch.ops.dsa.select_wait(picks, gate, [])


def test_naming_a_program_again_leaves_what_is_compiled(device, monkeypatch):
    """As a dry run of the passes does on a model that runs."""
    inputs = named(*arguments(device))
    monkeypatch.setitem(programs._compiled, inputs[3], lambda *taken: ("compiled",))
    assert named(*inputs[:3])[3] == inputs[3]
    assert programs.run(inputs[3], []) == "compiled"
