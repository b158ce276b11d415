"""Verification of drafts: the emitted tokens follow the target's distribution exactly, whatever was drafted."""

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from dsa_compile.errors import InputError
from dsa_compile.lowering.mtp_verify.greedy import LONG, MOST_PARTS, likeliest
from dsa_compile.lowering.mtp_verify.reference import draw
from dsa_compile.sampling import Sampling

DRAWS = 100_000
VOCAB = 6
NEAREST_TO_ONE = 1 - 2.0**-24
verify = torch.ops.dsa.mtp_verify


@given(vocab=st.sampled_from([1, 7, LONG - 1, LONG, LONG + MOST_PARTS, 3 * LONG + 5]), seed=seeds)
def test_the_likeliest_token_is_the_first_of_the_greatest_numbers(device, vocab, seed):
    torch.manual_seed(seed)
    logits = torch.randint(-9, 9, (2, 3, vocab)).float()
    logits[torch.rand(logits.shape) < 0.1] = float("nan")
    logits[0, 0], logits[1, 1] = float("-inf"), float("nan")
    want = [max(range(vocab), key=lambda t: (row[t] == row[t], row[t])) for row in logits.flatten(0, 1).tolist()]
    want[4] = 0  # nothing but NaN
    assert likeliest(logits.to(device)).flatten().tolist() == want


def distributions(*shape, device, seed=0):
    """Distributions over the vocabulary behind temperature and top-p: some tokens have none."""
    logits = torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)).to(device)
    probs = Sampling(temperature=0.7, top_p=0.9).target(logits.view(1, -1, VOCAB)).view(*shape, VOCAB)
    assert (probs == 0).any()
    return probs


def pick(probs, generator):
    """One token of each row of probs[..., VOCAB]."""
    rows = probs.flatten(0, -2)
    return torch.multinomial(rows, 1, replacement=True, generator=generator).view(probs.shape[:-1])


def chi_square(model, draft, drafts, device, rule):
    """p-value of 100,000 sequences of M+1 tokens, the first of them from one step under ``rule``, under the model.

    A table holds the distribution of a token given the one before; the first token follows token 0.
    """
    generator = torch.Generator(device).manual_seed(0)
    before, drafted = torch.zeros(DRAWS, dtype=torch.long, device=device), []
    for _ in range(drafts):
        drafted.append(pick(draft[drafted[-1] if drafted else before], generator))
    context = torch.stack([before, *drafted], 1)
    tokens, uniforms = context[:, 1:], torch.rand(DRAWS, drafts + 1, generator=generator, device=device)
    accepted, next_token = rule(model[context], tokens, draft[context[:, :-1]], uniforms, generator)
    sequence = before[:, None]
    for place in range(drafts + 1):
        drawn = torch.where(accepted == place, next_token, pick(model[sequence[:, -1]], generator))
        kept = tokens[:, place] if place < drafts else drawn
        sequence = torch.cat([sequence, torch.where(accepted > place, kept, drawn)[:, None]], 1)
    law, cell = torch.ones(1, device=device, dtype=torch.float64), torch.zeros_like(before)
    for place in range(drafts + 1):
        last = torch.arange(len(law), device=device) % VOCAB if place else law.long() * 0
        law = (law[:, None] * model[last].double()).flatten()
        cell = cell * VOCAB + sequence[:, place + 1]
    seen, expected = cell.bincount(minlength=len(law)), law * DRAWS
    possible = expected > 0
    if seen[~possible].any():
        return 0.0
    statistic = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2, statistic / 2))


def by_op(p, tokens, q, uniforms, generator):
    return verify(p, tokens, q, uniforms, False)


def as_given(p, tokens, q, uniforms, generator):
    """Drafts that were drawn, verified as if they were not: exact as well, only fewer are accepted."""
    return verify(p, tokens, None, uniforms, False)


def accepts_by_p_alone(p, tokens, q, uniforms, generator):
    accepted, following = verify(p, tokens, None, uniforms, False)
    return accepted, torch.where(accepted == 0, draw((p[:, 0] - q[:, 0]).clamp_min(0), uniforms[:, -1]), following)


def draws_from_p_on_rejection(p, tokens, q, uniforms, generator):
    accepted, _ = verify(p, tokens, q, uniforms, False)
    return accepted, pick(p[torch.arange(len(p), device=p.device), accepted], generator)


def draws_by_the_uniform_that_accepts(p, tokens, q, uniforms, generator):
    return verify(p, tokens, q, uniforms[:, [*range(tokens.shape[1]), 0]], False)


def always_accepts(p, tokens, q, uniforms, generator):
    return verify(p, tokens, q, torch.cat([uniforms[:, :-1] * 0 - 1, uniforms[:, -1:]], 1), False)


WRONG = (
    accepts_by_p_alone,
    draws_from_p_on_rejection,
    draws_by_the_uniform_that_accepts,
    always_accepts,
)


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_tokens_follow_the_target(device, drafts):
    model, draft = distributions(VOCAB, device=device), distributions(VOCAB, device=device, seed=1)
    assert (model - draft).abs().sum(-1).min() > 0.2
    assert chi_square(model, draft, drafts, device, by_op) > 1e-3
    assert chi_square(model, draft, drafts, device, as_given) > 1e-3


@pytest.mark.parametrize("drafts", [1, 2])
def test_tokens_follow_the_target_where_drafts_were_not_drawn(device, drafts):
    model = distributions(VOCAB, device=device)
    draft = torch.nn.functional.one_hot(model.argmax(-1).roll(1), VOCAB).to(model)
    assert chi_square(model, draft, drafts, device, by_op) > 1e-3


@pytest.mark.parametrize("wrong", WRONG, ids=lambda rule: rule.__name__)
def test_a_wrong_rule_is_told_from_the_target(device, wrong):
    model, draft = distributions(VOCAB, device=device), distributions(VOCAB, device=device, seed=1)
    assert chi_square(model, draft, 1, device, wrong) < 1e-6


@given(batch=st.integers(0, 4), drafts=st.integers(0, 3), seed=seeds, drawn=st.booleans())
def test_equals_the_definition(device, batch, drafts, seed, drawn):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(batch, n, VOCAB, generator=generator).double() for n in (drafts + 1, drafts))
    p, q = (x.square() / x.square().sum(-1, keepdim=True) for x in (p, q))
    tokens = torch.randint(VOCAB, (batch, drafts), generator=generator)
    q = q if drawn else torch.nn.functional.one_hot(tokens, VOCAB).double()
    uniforms = torch.rand(batch, drafts + 1, generator=generator).double()
    ours = verify(*(x.to(device) for x in (p, tokens)), q.to(device) if drawn else None, uniforms.to(device), False)
    rows = zip(p.tolist(), tokens.tolist(), q.tolist(), uniforms.tolist())
    assert list(zip(*(x.tolist() for x in ours))) == [naive.verify(*row) for row in rows]


def test_greedy_accepts_what_is_the_argmax(device):
    nan, inf = float("nan"), float("inf")
    rows = [[0.0, 2.0, 1.0], [1.0, 3.0, 3.0], [nan, -inf, -1.0], [nan, nan, nan]]
    logits = torch.tensor(rows, device=device).expand(5, 4, 3)
    drafts = torch.tensor([[1, 1, 2], [1, 1, 0], [1, 2, 2], [0, 1, 2], [2, 1, 2]], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        accepted, following = verify(logits.to(dtype), drafts, None, torch.rand(5, 4, device=device), True)
        assert accepted.tolist() == [3, 2, 1, 0, 0]
        assert following.tolist() == [0, 2, 1, 1, 1]


@pytest.mark.parametrize("vocab", [5, 129_280])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_token_without_probability_is_drawn_at_either_end(device, vocab, dtype):
    probs = torch.zeros(1, 1, vocab, device=device, dtype=dtype)
    probs[..., 1:-1] = 0.9 / (vocab - 2)
    none = torch.empty(1, 0, dtype=torch.long, device=device)
    for uniform, token in ((0.0, 1), (NEAREST_TO_ONE, vocab - 2), (1 - 2.0**-53, vocab - 2)):
        uniforms = torch.full((1, 1), uniform, device=device, dtype=torch.float64)
        accepted, following = verify(probs, none, None, uniforms, False)
        assert (accepted.item(), following.item()) == (0, token)


@pytest.mark.parametrize("uniform", [0.0, NEAREST_TO_ONE])
def test_certain_drafts_are_accepted_and_impossible_ones_never(device, uniform):
    certain = torch.eye(3, device=device)[None, [0, 1, 2]]
    uniforms = torch.full((1, 3), uniform, device=device)
    for draft_probs in (None, certain[:, :2]):
        accepted, following = verify(certain, torch.tensor([[0, 1]], device=device), draft_probs, uniforms, False)
        assert (accepted.item(), following.item()) == (2, 2)
        accepted, following = verify(certain, torch.tensor([[0, 2]], device=device), draft_probs, uniforms, False)
        assert (accepted.item(), following.item()) == (1, 1)


def test_a_rejection_by_rounding_alone_draws_from_the_target(device):
    q = torch.tensor([[[0.0, 1.0]]], device=device)
    p = torch.cat([q, q], 1) * (1 - 2.0**-20)
    uniforms = torch.full((1, 2), NEAREST_TO_ONE, device=device)
    accepted, following = verify(p, torch.ones(1, 1, dtype=torch.long, device=device), q, uniforms, False)
    assert (accepted.item(), following.item()) == (0, 1)


def test_nan_is_neither_accepted_nor_drawn(device):
    p = torch.tensor([[[float("nan"), 0.0, 0.5], [0.0, 1.0, 0.0]]], device=device)
    for q in (None, torch.full((1, 1, 3), 1 / 3, device=device)):
        accepted, following = verify(
            p, torch.zeros(1, 1, dtype=torch.long, device=device), q, torch.zeros(1, 2, device=device), False
        )
        assert (accepted.item(), following.item()) == (0, 2)
    nothing = torch.full((1, 3), float("nan"), device=device)
    assert draw(nothing, torch.full((1,), 0.5, device=device)).item() == 0


def sampled(device, batch=3, drafts=2, dtype=torch.float32):
    p, q = (torch.rand(batch, n, 7, device=device, dtype=dtype).softmax(-1) for n in (drafts + 1, drafts))
    tokens = torch.randint(7, (batch, drafts), device=device)
    return p, tokens, q, torch.rand(batch, drafts + 1, device=device)


def test_a_sequence_gets_the_same_alone_and_again(device):
    inputs = sampled(device, batch=40)
    first = verify(*inputs, False)
    alone = [verify(*(x[b : b + 1] for x in inputs), False) for b in range(40)]
    for whole, parts in zip(first, zip(*alone)):
        assert torch.equal(whole, torch.cat(parts))
    for again in (verify(*inputs, False) for _ in range(5)):
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("drafts", [0, 2])
def test_opcheck(device, drafts):
    p, tokens, q, uniforms = sampled(device, drafts=drafts)
    for draft_probs, greedy in ((q, False), (None, False), (None, True)):
        torch.library.opcheck(verify.default, (p, tokens, draft_probs, uniforms, greedy))
    torch.library.opcheck(verify.default, (p.requires_grad_(), tokens, q, uniforms, False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_holds_it(device):
    inputs = sampled(device)
    graph = torch.cuda.CUDAGraph()
    verify(*inputs, False)
    with torch.cuda.graph(graph):
        out = verify(*inputs, False)
    for x, other in zip(inputs, sampled(device)):
        x.copy_(other)
    graph.replay()
    assert all(map(torch.equal, out, verify(*inputs, False)))


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("target_probs", lambda x: x[0], r"target_probs \[B, M\+1, vocab\], came \[3, 7\]"),
        ("target_probs", lambda x: x[:, :0], r"target_probs \[B, M\+1, vocab\], came \[3, 0, 7\]"),
        ("target_probs", lambda x: x.bfloat16(), "target_probs in float32 or float64, came torch.bfloat16"),
        ("draft_tokens", lambda x: x[:, :1], r"draft_tokens \[3, 2\] for target_probs \[3, 3, 7\], came \[3, 1\]"),
        ("draft_tokens", lambda x: x.int(), "draft_tokens in int64, came torch.int32"),
        ("draft_probs", lambda x: x[..., :6], r"draft_probs \[3, 2, 7\] for .*, came \[3, 2, 6\]"),
        ("draft_probs", lambda x: x.double(), "draft_probs in torch.float32 as target_probs, came torch.float64"),
        ("uniforms", lambda x: x[:, 1:], r"uniforms \[3, 3\] for .*, came \[3, 2\]"),
        ("uniforms", lambda x: x.to("meta"), "uniforms on .* as target_probs, came meta"),
    ],
)
def test_inputs_that_do_not_fit_are_named(device, name, change, text):
    names = ("target_probs", "draft_tokens", "draft_probs", "uniforms")
    inputs = dict(zip(names, sampled(device)))
    inputs[name] = change(inputs[name])
    with pytest.raises(InputError, match=text):
        verify(*inputs.values(), False)
