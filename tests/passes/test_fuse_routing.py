"""Routers of DeepSeek-V3 and its kin become one op; what does anything else is left as it is."""

import pytest
import torch
from harness import PassHarness
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

from dsa_compile.passes import fuse_routing
from dsa_compile.passes.fuse_routing import FuseRouting

ROUTE = "dsa.route.default"


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(fuse_routing, "on_gpu", lambda x: True)


def router(kind=DeepseekV3TopkRouter, family="deepseek_v3", experts=16, groups=4, best=2, topk=3, **fields):
    config = AutoConfig.for_model(family)
    config.update({"n_routed_experts": experts, "n_group": groups, "topk_group": best, "num_experts_per_tok": topk})
    config.update({"hidden_size": 8, **fields})
    made = kind(config)
    torch.manual_seed(0)
    torch.nn.init.normal_(made.weight)
    torch.nn.init.normal_(made.e_score_correction_bias, std=0.1)
    return made


def in_order(made):
    """What a router returns, experts of a token by number: which stands where is not the router's to say."""

    def run(x):
        logits, weights, experts = made(x)
        dense = torch.zeros_like(logits).scatter(1, experts, weights)
        return logits, dense, experts.sort(-1).values

    return run


def check(made, tokens=5, **expected):
    with torch.no_grad():
        return PassHarness(FuseRouting())(in_order(made), torch.randn(tokens, 8), **expected)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"groups": 1, "best": 1},
        {"groups": 8, "best": 8, "topk": 16},
        {"experts": 12, "groups": 2, "best": 1, "topk": 1},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 2.5},
    ],
)
def test_a_router_is_one_op_that_chooses_alike(fields):
    outcome = check(router(**fields), matches=1, ops={ROUTE: 1, "topk": 0 - 3}, atol=1e-6)
    assert not [n for n in outcome.gm.graph.nodes if n.target in ("scatter_", torch.topk)]


@pytest.mark.parametrize(
    ("kind", "family"), [(GlmMoeDsaTopkRouter, "glm_moe_dsa"), (Glm4MoeLiteTopkRouter, "glm4_moe_lite")]
)
def test_other_families(kind, family):
    check(router(kind, family), matches=1, ops={ROUTE: 1}, atol=1e-6)


def test_any_number_of_tokens(monkeypatch):
    check(router(), tokens=1, matches=1, ops={ROUTE: 1}, atol=1e-6)
    with torch.no_grad():
        PassHarness(FuseRouting())(
            in_order(router()), torch.randn(7, 8), matches=1, ops={ROUTE: 1}, atol=1e-6, dynamic=True
        )


class Other(DeepseekV3TopkRouter):
    """A router that differs by what ``change`` does."""

    change = None

    def forward(self, x):
        logits = torch.nn.functional.linear(x.float(), self.weight.float())
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        best = 3 if self.change == "three a group" else 2
        worth = biased.view(-1, 4, 4).topk(best, dim=-1)[0].sum(dim=-1)
        groups = torch.topk(worth, k=2, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(worth)
        mask.scatter_(1, groups, 1)
        mask = mask.unsqueeze(-1).expand(-1, 4, 4).reshape(-1, 16)
        closed = 0.0 if self.change == "closed to 0" else float("-inf")
        biased = biased.masked_fill(~mask.bool(), closed)
        experts = torch.topk(biased, k=3, dim=-1, sorted=False)[1]
        weights = scores.gather(1, experts)
        if self.change == "no scale":
            return logits, weights, experts
        if self.change == "reads scores":
            logits = logits + scores
        return logits, weights * 2.0, experts


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("three a group", "its topk is not that of a known router"),
        ("closed to 0", "its masked_fill is not that of a known router"),
        ("no scale", "its weights are not multiplied by a number"),
        ("reads scores", "something else reads what leads to its choice"),
    ],
)
def test_what_differs_is_left(change, reason):
    made = router(Other)
    made.change = change
    check(made, matches=0, reason=reason)


def test_the_router_that_is_changed_is_one_that_matches():
    check(router(Other), matches=1, ops={ROUTE: 1}, atol=1e-6)


def test_more_experts_than_a_program_holds_are_left():
    check(router(experts=2048, groups=1, best=1), matches=0, reason="more than 1024 experts")


def test_nothing_changes_elsewhere(monkeypatch):
    monkeypatch.undo()
    assert not check(router(), matches=0).entries


def test_nothing_changes_where_gradients_are_wanted():
    PassHarness(FuseRouting())(in_order(router()), torch.randn(2, 8), matches=0, reason="gradients are wanted")
