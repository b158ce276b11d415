"""A model whose steps of one token run by products of rows and fused routing says what it says without them."""

import pytest
import torch

import dsa_compile
from dsa_compile.models import experts
from dsa_compile.models.miniature import miniature
from dsa_compile.passes import fuse_routing, row_products

OPS = [getattr(torch.ops.dsa, name).default for name in ("row_products", "expert_products", "route")]


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("deepseek_v32", "mli"),
        pytest.param("deepseek_v32", "own", marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", "own", marks=pytest.mark.slow),
    ],
)
def test_equal_tokens(family, plan, device, graphs, monkeypatch):
    def generated():
        options = {"selector": "attention"} if family == "glm4_moe_lite" else {"plan": plan, "layer0": "serial"}
        model = dsa_compile.optimize(miniature(family).to(device), lowering="eager", **options)
        prompt = torch.arange(3, 43, device=device)[None]
        return model.generate(prompt, max_new_tokens=6, do_sample=False)

    for graph_pass in (row_products, fuse_routing):
        monkeypatch.setattr(graph_pass, "on_gpu", lambda x: False)
    monkeypatch.setattr(experts, "on_gpu", lambda x: False)
    want = generated()
    torch._dynamo.reset()
    graphs.clear()
    for graph_pass in (row_products, fuse_routing):
        monkeypatch.setattr(graph_pass, "on_gpu", lambda x: True)
    monkeypatch.setattr(experts, "on_gpu", lambda x: not torch.is_grad_enabled())
    assert torch.equal(generated(), want)
    step = graphs[-1].graph
    assert all(step.find_nodes(op="call_function", target=op) for op in OPS)
