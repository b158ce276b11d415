"""Routed experts give what the stock model's give, in the form that suits the number of tokens."""

import pytest
import torch
from cases import stock
from mtp import prepared

from dsa_compile.models import experts


@pytest.mark.parametrize(("tokens", "form"), [(1, "batched"), (2, "grouped"), (9, "grouped")])
def test_one_token_reads_its_experts_where_they_lie(device, monkeypatch, tokens, form):
    ran = []
    monkeypatch.setattr(experts, "MOST_COPIED", 0)
    for name in ("batched", "grouped"):
        real = getattr(experts, f"{name}_mm_experts_forward")
        monkeypatch.setattr(
            experts,
            f"{name}_mm_experts_forward",
            lambda *args, real=real, name=name: (ran.append(name), real(*args))[1],
        )
    layers = [
        model.model.layers[1].mlp for model in (prepared("deepseek_v32", device), stock("deepseek_v32", device, 2))
    ]
    states = torch.randn(1, tokens, 64, device=device)
    with torch.no_grad():
        ours, theirs = (layer(states) for layer in layers)
    assert ran == [form]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
