"""What holds under every plan, whatever its layers share."""

import pytest
import torch
from cases import TOPK, assert_rows_equal, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.config import DSAConfig
from dsa_compile.models.miniature import miniature
from dsa_compile.plan import LAYER0, Plan, plan_of
from dsa_compile.replanning import Replanned

pytestmark = pytest.mark.shared_graphs
LAYERS, LENGTH = 3, 3 * TOPK
FAMILIES = {"deepseek_v3": {"selector": "attention"}, "glm_moe_dsa": {}}
EVERYTHING = Plan((None,) * LAYERS)


@st.composite
def lists(draw):
    """A list of entries, one a layer."""
    first = draw(st.sampled_from(["own", "dense", "previous_step"]))
    later = [["own", "previous", "dense", *(f"from:{j}" for j in range(i + 1))] for i in range(1, LAYERS)]
    return [first, *(draw(st.sampled_from(entries)) for entries in later)]


@st.composite
def named(draw):
    """A plan by name, and for one with MLI what its first layer does."""
    letters = draw(st.lists(st.sampled_from("FS"), min_size=LAYERS - 1, max_size=LAYERS - 1))
    share = f"share:F{''.join(letters)}"
    wanted = draw(st.sampled_from(["own", "mli", "share:1/2", share, f"{share}+mli"]))
    late = any(s not in (i, None) and s > 0 for i, s in enumerate(plan_of(wanted, [True] * LAYERS).sources))
    layer0 = draw(st.sampled_from(LAYER0 if late and "mli" in wanted and "share" not in wanted else LAYER0[:1]))
    return wanted, layer0


plans = named() | lists().map(lambda entries: (entries, "serial"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def over_all(family, device):
    """A model whose K covers all tokens of a call."""
    model = miniature(family, num_hidden_layers=LAYERS).to(device)
    return Replanned(model, DSAConfig(index_topk=LENGTH + 1, **FAMILIES[family]))


@settings(max_examples=6, derandomize=True)
@given(plan=plans, length=st.integers(2, LENGTH))
def test_where_k_covers_all_tokens_every_plan_is_dense(over_all, plan, length, device):
    ids = token_ids(1, length, device)[0]
    dense = over_all.logits(ids, EVERYTHING)
    assert_rows_equal(over_all.logits(ids, over_all.plan(*plan)), dense, atol=1e-4)


@pytest.fixture(scope="module")
def same_layers(family, device):
    """A model whose layers see the same rows and select alike, since the last alone moves the hidden states."""
    model = miniature(family, num_hidden_layers=LAYERS).to(device)
    *others, last = model.model.layers
    for layer in others:
        layer.self_attn.load_state_dict(last.self_attn.state_dict())
        layer.input_layernorm.load_state_dict(last.input_layernorm.state_dict())
        layer.self_attn.o_proj.weight.data.zero_()
    for name, parameter in model.named_parameters():
        if "down_proj" in name:
            parameter.data.zero_()
    return Replanned(model, DSAConfig(index_topk=TOPK, **FAMILIES[family]))


@settings(max_examples=6, derandomize=True)
@given(plan=plans)
def test_layers_that_select_alike_are_plain_under_every_plan(same_layers, plan, device):
    ids, wanted = token_ids(1, LENGTH, device)[0], same_layers.plan(*plan)
    plain, ours = same_layers.logits(ids, same_layers.own), same_layers.logits(ids, wanted)
    if wanted.sources[-1] is None:
        assert_rows_equal(ours, same_layers.logits(ids, EVERYTHING))
        assert (ours - plain).abs().max() > 1e-3
    else:
        assert torch.equal(ours, plain)
