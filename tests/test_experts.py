"""Routed experts give what the stock model's give, in the form that suits the number of tokens."""

import copy

import pytest
import torch

import dsa_compile
from dsa_compile.models import experts
from dsa_compile.models.miniature import miniature


@pytest.mark.parametrize(
    ("tokens", "gpu", "forms"),
    [
        (1, False, ["batched"]),
        (2, False, ["grouped"]),
        (9, False, ["grouped"]),
        (1, True, []),
        (2, True, []),
        (3, True, ["grouped"]),
    ],
)
def test_few_tokens_read_their_experts_where_they_lie(device, monkeypatch, tokens, gpu, forms):
    ran = []
    monkeypatch.setattr(experts, "MOST_COPIED", 0)
    monkeypatch.setattr(experts, "on_gpu", lambda x: gpu)
    for name in ("batched", "grouped"):
        real = getattr(experts, f"{name}_mm_experts_forward")
        monkeypatch.setattr(
            experts,
            f"{name}_mm_experts_forward",
            lambda *args, real=real, name=name: (ran.append(name), real(*args))[1],
        )
    stock = miniature("deepseek_v32", num_hidden_layers=2, num_local_experts=8).to(device)
    model = dsa_compile.prepare(copy.deepcopy(stock))
    states = torch.randn(1, tokens, 64, device=device)
    with torch.no_grad():
        ours, theirs = (each.model.layers[1].mlp(states) for each in (model, stock))
    assert ran == forms
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
