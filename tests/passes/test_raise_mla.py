"""Attention over keys and values that kv_b_proj expands is attention over its latents."""

import pytest
import torch
import torch.nn.functional as F
from graphs import DIMS, NOPE, RANK, SCALE, over_pool, unrelated
from harness import PassHarness, capture
from strategies import causal, mask_of, mla_rows
from torch import nn
from transformers import masking_utils

from dsa_compile.passes.base import arguments
from dsa_compile.passes.raise_mla import RaiseMLA

check = PassHarness(RaiseMLA())
MLA = torch.ops.dsa.mla.default
H, P, V = DIMS.n_heads, DIMS.qk_rope_head_dim, DIMS.v_head_dim
ROUNDING = 1e-12
RAISED = {
    "dsa.mla.default": 1,
    "scaled_dot_product_attention": -1,
    "linear": -1,
    "view": -1,
    "new_empty": -1,
    "copy_": -2,
    "expand": -1,
    "split": -1,
    "transpose": -2,
    "squeeze": 2,
}


class Attention(nn.Module):
    """How transformers expands latents [B, 1, S, R] and rope keys [B, 1, S, P], and attends."""

    def __init__(self, bias=False):
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, H * (NOPE + V), bias=bias)

    def expand(self, latent, k_rope):
        kv = self.kv_b_proj(latent).view(latent.shape[0], latent.shape[2], -1, NOPE + V).transpose(1, 2)
        k_nope, value = torch.split(kv, [NOPE, V], dim=-1)
        key = kv.new_empty(*kv.shape[:-1], NOPE + P)
        key[..., :NOPE].copy_(k_nope)
        key[..., NOPE:].copy_(k_rope.expand(-1, H, -1, -1))
        return key, value

    def attend(self, q, key, value, mask, **options):
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=SCALE, **options)

    def forward(self, q, latent, k_rope, mask=None, **options):
        key, value = self.expand(latent, k_rope)
        return self.attend(q, key, value, mask, **options).transpose(1, 2).contiguous().flatten(2)


def inputs(device, queries=5, slots=11):
    """Queries, latents, rope keys, and the mask of queries that are the last tokens."""
    rows = mla_rows(DIMS, 2, queries, slots, device)
    return rows.q, rows.c_kv.unsqueeze(1), rows.k_pe.unsqueeze(1), mask_of(rows.visible, slots)


def attention(device, cls=Attention, **fields):
    return cls(**fields).to(device).double()


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_chain_becomes_one_op(device, queries, dynamic):
    q, latent, k_rope, mask = inputs(device, queries)
    model = attention(device)
    outcome = check(model, q, latent, k_rope, mask, matches=1, ops=RAISED, atol=ROUNDING, dynamic=dynamic)
    (mla,) = outcome.nodes(MLA)
    args = arguments(mla)
    assert args["mask"].op == "placeholder"
    assert torch.equal(outcome.values[args["c_kv"]], latent[:, 0])
    assert torch.equal(outcome.values[args["k_pe"]], k_rope[:, 0])
    assert torch.equal(outcome.values[args["kv_b_weight"]], model.kv_b_proj.weight)
    rest = "visible", "topk_indices", "nope", "scale", "indexer_params", "index_topk"
    assert [args[name] for name in rest] == [None, None, NOPE, SCALE, [], 0]
    assert outcome.entries[0].reason == "dsa::mla with a mask"


def test_every_key_is_seen_without_a_mask(device):
    outcome = check(attention(device), *inputs(device)[:3], matches=1, ops=RAISED, atol=ROUNDING)
    args = arguments(outcome.nodes(MLA)[0])
    assert (args["visible"], args["mask"]) == (None, None)


@pytest.mark.parametrize("queries", [1, 5, 11])
def test_the_causal_flag_becomes_ranges_from_the_top_left(device, queries):
    model, given = attention(device), inputs(device, queries)[:3]
    outcome = check(model, *given, is_causal=True, matches=1, ops={"dsa.mla.default": 1}, atol=ROUNDING)
    visible = outcome.values[arguments(outcome.nodes(MLA)[0])["visible"]]
    assert torch.equal(visible, causal(2, queries, queries).to(device))


class Masked(Attention):
    """Attention under a mask that transformers makes inside the graph."""

    def forward(self, q, latent, k_rope, offset=0, mask_function=masking_utils.causal_mask_function, **fields):
        mask = masking_utils.sdpa_mask(
            q.shape[0],
            q.shape[2],
            latent.shape[2],
            q_offset=offset,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            device=q.device,
            **fields,
        )
        return super().forward(q, latent, k_rope, mask)


def raised_mask(device, queries, *args, dynamic=None, **kwargs):
    """Values of (visible, mask) that the mask of a `Masked` call became."""
    given = inputs(device, queries)[:3]
    outcome = check(
        attention(device, Masked),
        *given,
        *args,
        matches=1,
        ops={"dsa.mla.default": 1},
        atol=ROUNDING,
        dynamic=dynamic,
        **kwargs,
    )
    args = arguments(outcome.nodes(MLA)[0])
    return tuple(None if args[name] is None else outcome.values[args[name]] for name in ("visible", "mask"))


@pytest.mark.parametrize(("queries", "offset"), [(11, 0), (5, 6), (1, 10), (5, 2)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_causal_mask_becomes_ranges(device, queries, offset, dynamic):
    for start in (offset, torch.tensor(offset, device=device)):
        visible, mask = raised_mask(device, queries, start, dynamic=dynamic)
        assert mask is None
        assert torch.equal(visible, causal(2, queries, queries + offset).to(device))


def test_packed_documents_become_ranges(device):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5], [*range(11)]], device=device)

    def packed(model, *rows):
        new = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
        documents = masking_utils.packed_sequence_mask_function(new.cumsum(-1))
        causal_function = masking_utils.causal_mask_function
        return model(*rows, mask_function=masking_utils.and_masks(causal_function, documents))

    class Packed(Masked):
        def forward(self, *rows):
            return packed(super().forward, *rows)

    outcome = check(
        attention(device, Packed), *inputs(device, 11)[:3], matches=1, ops={"dsa.mla.default": 1}, atol=ROUNDING
    )
    args = arguments(outcome.nodes(MLA)[0])
    start = [[0, 0, 0, 3, 3, 5, 5, 5, 5, 5, 5], [0] * 11]
    want = torch.stack([torch.tensor(start), torch.arange(1, 12).expand(2, 11)], -1).int().unsqueeze(1)
    assert torch.equal(outcome.values[args["visible"]], want.to(device))
    assert args["mask"] is None


def test_padding_stays_a_mask(device):
    padding = torch.ones(2, 11, dtype=torch.bool, device=device)
    padding[1, :3] = False
    visible, mask = raised_mask(device, 11, attention_mask=padding)
    assert visible is None
    assert torch.equal(mask, torch.ones(11, 11, device=device).tril().bool() & padding[:, None, None])


def test_a_mask_that_is_no_range_stays_a_mask(device):
    def window(b, h, q, k):
        return (k <= q) & (k > q - 3)

    def two_sided(b, h, q, k):
        return k + 1 <= q

    def odd_documents(b, h, q, k):
        kind = torch.arange(11, device=device).remainder(2).expand(2, 11)
        return (k <= q) & (kind[b, q] == kind[b, k])

    for function in (window, two_sided, odd_documents):
        visible, mask = raised_mask(device, 11, mask_function=function)
        assert visible is None
        assert mask is not None


def test_layers_share_one_visible(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(3))

        def forward(self, q, latent, k_rope):
            mask = masking_utils.sdpa_mask(2, 5, 11, q_offset=6, allow_is_causal_skip=False, device=q.device)
            return [layer(q, latent, k_rope, mask) for layer in self.layers]

    outcome = check(
        attention(device, Model),
        *inputs(device)[:3],
        matches=3,
        ops={"dsa.mla.default": 3, "le": -1},
        atol=ROUNDING,
    )
    assert len({arguments(n)["visible"] for n in outcome.nodes(MLA)}) == 1
    assert [e.where for e in outcome.entries] == ["layers.0", "layers.1", "layers.2"]


class Selecting(Attention):
    """DeepSeek-V3.2's mask: what a selection names, within a base mask."""

    def forward(self, q, latent, k_rope, mask, picks):
        others = picks.new_ones((*picks.shape[:2], latent.shape[2]), dtype=torch.bool)
        others = others.scatter(-1, picks.long(), False).unsqueeze(1)
        return super().forward(q, latent, k_rope, mask & ~others)


def test_a_scattered_selection_becomes_indices(device):
    picks = torch.randint(0, 11, (2, 5, 4), dtype=torch.int32, device=device)
    outcome = check(
        attention(device, Selecting), *inputs(device), picks, matches=1, ops=RAISED | {"scatter": -1}, atol=ROUNDING
    )
    args = arguments(outcome.nodes(MLA)[0])
    assert args["topk_indices"].op == args["mask"].op == "placeholder"
    assert torch.equal(outcome.values[args["topk_indices"]], picks)


def test_noise_changes_nothing(device):
    class Noisy(Attention):
        def attend(self, q, key, value, mask, **options):
            q.cos()
            out = super().attend(q * 1, key, value.contiguous(), mask.view(mask.shape), **options)
            self.seen = out.mean()
            return out

        def forward(self, q, latent, k_rope, mask):
            return super().forward(q, latent.view(latent.shape), k_rope + 0, mask), latent * 2, self.seen

    outcome = check(attention(device, Noisy), *inputs(device), matches=1, ops={"dsa.mla.default": 1}, atol=ROUNDING)
    assert outcome.nodes(F.scaled_dot_product_attention) == []


def test_attention_captured_alone_has_no_place(device):
    outcome = check(attention(device), *inputs(device), matches=1, ops={"dsa.mla.default": 1}, atol=ROUNDING)
    assert [e.where for e in outcome.entries] == [""]


class WholeKeys(Attention):
    def expand(self, latent, k_rope):
        key, value = super().expand(latent, k_rope)
        self.keys = key
        return key, value

    def forward(self, *args):
        return super().forward(*args), self.keys.sum()


class ReadValues(Attention):
    def attend(self, q, key, value, mask):
        return super().attend(q, key, value, mask) + value.mean()


class Cached(Attention):
    def attend(self, q, key, value, mask):
        return super().attend(q, torch.cat([key, key], 2), torch.cat([value, value], 2), torch.cat([mask, mask], -1))


class Eager(Attention):
    def attend(self, q, key, value, mask):
        scores = (q @ key.transpose(2, 3) * SCALE).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value


class KeysPerHead(Attention):
    def forward(self, q, latent, k_rope, mask):
        return super().forward(q, latent, k_rope.repeat(1, H, 1, 1), mask)


class OtherHalves(Attention):
    def expand(self, latent, k_rope):
        key, value = super().expand(latent, k_rope)
        return torch.cat([key[..., NOPE:], key[..., :NOPE]], -1), value


class FloatMask(Attention):
    def attend(self, q, key, value, mask):
        return super().attend(q, key, value, mask.double())


class MaskPerHead(Attention):
    def attend(self, q, key, value, mask):
        return super().attend(q, key, value, mask.expand(-1, H, -1, -1))


class MaskOfTwoDimensions(Attention):
    def attend(self, q, key, value, mask):
        return super().attend(q, key, value, mask[0, 0])


class Dropout(Attention):
    def attend(self, q, key, value, mask):
        return super().attend(q, key, value, mask, dropout_p=1e-30)


class Grouped(Attention):
    def attend(self, q, key, value, mask):
        return super().attend(q, key, value, mask, enable_gqa=True)


class ThreeDimensions(Attention):
    def forward(self, q, latent, k_rope, mask):
        kv = self.kv_b_proj(latent.squeeze(1)).view(latent.shape[0], latent.shape[2], -1, NOPE + V).transpose(1, 2)
        return super().attend(q, torch.cat([kv[..., :NOPE], k_rope.expand(-1, H, -1, -1)], -1), kv[..., NOPE:], mask)


class WrittenBetween(Attention):
    def attend(self, q, key, value, mask):
        self.latent.mul_(2)
        return super().attend(q, key, value, mask)

    def forward(self, q, latent, k_rope, mask):
        self.latent = latent
        return super().forward(q, latent, k_rope, mask)


NEAR_MISSES = {
    WholeKeys: "the keys are not made of the latent's and the rope key's halves",
    ReadValues: "read by others than this attention",
    Cached: "caches expanded keys and values in a stock cache; optimize() caches latents",
    Eager: "use attn_implementation='sdpa'",
    KeysPerHead: "the rope key is not one for all heads",
    OtherHalves: "the keys are not made of",
    FloatMask: "a mask of torch.float64; only bool masks",
    MaskPerHead: "expected a mask [B or 1, 1, T, 11], found [2, 3, 5, 11]",
    MaskOfTwoDimensions: "expected a mask [B or 1, 1, T, 11], found [5, 11]",
    Dropout: "attention dropout 1e-30",
    Grouped: "grouped queries",
    ThreeDimensions: "expected latents [B, 1, S, R], found [2, 11, 9]",
    WrittenBetween: "mul_ writes in place before attention reads",
}


@pytest.mark.parametrize("cls", NEAR_MISSES)
def test_near_misses_stay(device, cls):
    check(attention(device, cls), *inputs(device), matches=0, reason=NEAR_MISSES[cls])


def test_a_bias_stays(device):
    check(attention(device, bias=True), *inputs(device), matches=0, reason="kv_b_proj has a bias")


def test_a_scale_that_is_an_input_becomes_a_constant_that_is_guarded(device):
    class Scaled(Attention):
        def forward(self, q, latent, k_rope, mask, scale):
            key, value = self.expand(latent, k_rope)
            return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale.item())

    model, given = attention(device, Scaled), inputs(device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        graph = capture(model, *given, torch.tensor(SCALE, dtype=torch.float64))
        outcome = check(graph, matches=1, ops={"dsa.mla.default": 1}, atol=ROUNDING)
        assert arguments(outcome.nodes(MLA)[0])["scale"] == SCALE
        fast = torch.compile(model, backend="dsa", options={"lowering": "eager"}, fullgraph=True)
        for scale in torch.tensor([SCALE, 2 * SCALE], dtype=torch.float64):
            torch.testing.assert_close(fast(*given, scale), model(*given, scale), atol=ROUNDING, rtol=0)


def test_rewritten_and_other_attention_is_untouched(device):
    rows = mla_rows(DIMS, 2, 5, 11, device)
    pool = torch.cat([rows.c_kv, rows.k_pe], -1)
    assert check(over_pool, rows.q, pool, rows.kv_b_weight, rows.visible, matches=0).entries == []
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    assert check(unrelated, x, weight, matches=0).entries == []
