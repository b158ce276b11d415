"""Index keys in fp8: a model selects as one whose indexer gets the values that fp8 makes of its queries and keys."""

import pytest
import torch
from cases import ATOL, TOPK, left_padded, optimized, token_ids

from dsa_compile.errors import CacheError
from dsa_compile.lowering.fp8_keys import decode, quantise
from dsa_compile.lowering.select.projections import hadamard, project
from dsa_compile.passes.absorption import whole_pool
from dsa_compile.passes.base import arguments, is_op

SETTINGS = {
    "deepseek_v32": ("deepseek_v32", {"layers": 1}),
    "glm_moe_dsa": ("glm_moe_dsa", {"layers": 2}),
    "attached": (
        "deepseek_v3",
        {"layers": 1, "selector": "indexer", "indexer": "random", "index_n_heads": 8, "index_head_dim": 16},
    ),
}
FP8 = {"index_dtype": "fp8"}


def build(setting, device, lowering="eager", **cache):
    case, fields = SETTINGS[setting]
    model = optimized(case, device, lowering, index_topk=TOPK, cache=cache, **fields)
    model.set_experts_implementation("batched_mm")
    return model


def rounded(x):
    codes, scales = quantise(x)
    return (decode(codes, torch.float32) * scales.unsqueeze(-1)).to(x.dtype)


def project_rounded(*args, **kwargs):
    q, key, weights = project(*args, **kwargs)
    return rounded(q), rounded(key), weights


@pytest.fixture
def indexers_round(monkeypatch):
    """Whatever is built and first called here has indexers of rounded queries and keys."""
    monkeypatch.setattr("dsa_compile.models.latent_attention.project", project_rounded)
    monkeypatch.setattr("dsa_compile.passes.insert_indexer.project", project_rounded)


def generated(model, device):
    """Tokens and logits after a batch of two prompts, one padded on the left, and the cache."""
    ids, mask = token_ids(2, 5 * TOPK, device), left_padded(2, 5 * TOPK, device)["attention_mask"]
    ways = {"do_sample": False, "eos_token_id": -1, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(ids, attention_mask=mask, max_new_tokens=6, **ways)
    return found.sequences, torch.stack(found.logits), found.past_key_values


def check_reads(gm):
    """Every selection reads codes and scales that are inputs, behind the write into them; returns how many do."""
    written, found = set(), 0
    for node in gm.graph.nodes:
        if is_op(node, "cache_write") and arguments(node)["index_key"] is not None:
            written.add((node.args[1], node.args[7]))
        if is_op(node, "select"):
            pools = tuple(whole_pool(arguments(node)[name]) for name in ("index_keys", "index_scales"))
            assert pools in written
            assert all(pool.op == "placeholder" for pool in pools)
            found += 1
    return found


@pytest.mark.parametrize("latents", [{}, {"dtype": "fp8"}], ids=["latents", "latents in fp8"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_generate_equals_that_of_an_indexer_that_rounds(setting, latents, device, graphs, request):
    tokens, logits, cache = generated(build(setting, device, **FP8, **latents), device)
    assert [check_reads(graph) for graph in graphs] == [1, 1]
    request.getfixturevalue("indexers_round")
    want, exact, reference = generated(build(setting, device, **latents), device)
    assert torch.equal(tokens, want)
    assert torch.equal(logits, exact)
    assert (cache.fp8_keys, reference.fp8_keys) == (True, False)
    one, two = cache.layers[0], reference.layers[0]
    assert torch.equal(one.latent, two.latent)
    assert torch.equal(decode(one.index_keys, torch.float32) * one.index_scales[..., None], two.index_keys)


def test_rounding_changes_what_is_attended_to(device):
    _, logits, _ = generated(build("deepseek_v32", device, **FP8), device)
    _, plain, _ = generated(build("deepseek_v32", device), device)
    assert 0 < (logits - plain).norm() < plain.norm()


def test_layers_whose_keys_nobody_reads_hold_none(device):
    row = 4 * (32 + 8)
    for case, fields in (("glm_moe_dsa", {}), ("deepseek_v32", {"plan": "share:FSF"})):
        cache = optimized(case, device, cache=FP8, **fields).make_cache(2, 64)
        assert cache.bytes_per_token() == [row + 16 + 4, row, row + 16 + 4]
        assert [layer.index_scales is None for layer in cache.layers] == [False, True, False]


@pytest.mark.parametrize("setting", ["glm_moe_dsa", "attached"])
def test_rotated_keys_change_no_exact_score(setting, device):
    """The attached indexer's are rotated by a pass, a model's own by its forward."""
    turned, plain = build(setting, device, rotate_index=True), build(setting, device)
    (tokens, logits, cache), (want, exact, reference) = (generated(model, device) for model in (turned, plain))
    assert torch.equal(tokens, want)
    torch.testing.assert_close(logits, exact, atol=ATOL, rtol=0)
    one, two = cache.layers[0].index_keys, reference.layers[0].index_keys
    torch.testing.assert_close(one, two @ hadamard(16, two.dtype, device))
    assert not torch.allclose(one, two, atol=1e-2)
    for model, other in ((turned, reference), (plain, cache)):
        with torch.no_grad(), pytest.raises(CacheError, match="under another plan, indexer or rotate_index"):
            model(token_ids(2, 1, device), past_key_values=other)
    assert turned.state_dict().keys() == plain.state_dict().keys()


def test_inductor_gives_the_tokens_of_the_rewritten_graph(device):
    found, want = (
        generated(build("deepseek_v32", device, lowering, **FP8, dtype="fp8", rotate_index=True), device)[0]
        for lowering in ("inductor", "eager")
    )
    assert torch.equal(found, want)
