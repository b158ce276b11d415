"""What bf16 and fp8 index keys cost a selection, beside transformers' own indexers in float32."""

import copy

import pytest
import torch
from cases import NATIVE, stock, token_ids
from torch.utils._python_dispatch import TorchDispatchMode

import dsa_compile
from dsa_compile.lowering.fp8_keys import quantise
from dsa_compile.lowering.mla.reference import expand_keys
from dsa_compile.lowering.rows import attend, kept
from dsa_compile.lowering.select.reference import select

TOKENS, TOPK = 256, 32


class Calls(TorchDispatchMode):
    """Arguments of every selection and attention of a model that is not compiled."""

    def __init__(self):
        super().__init__()
        self.select, self.mla = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.dsa.select.default:
            self.select.append(args)
        elif function is torch.ops.dsa.mla.default and len(self.mla) < len(self.select):
            self.mla.append(args)
        return function(*args, **(kwargs or {}))


def calls(case, device):
    """Of the first layers that select, in float32, each selection with the attention that reads it first."""
    model = copy.deepcopy(stock(case, device))
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = TOPK
    model.config.index_topk = TOPK
    model = dsa_compile.prepare(model)
    with Calls() as seen, torch.no_grad():
        model(token_ids(2, TOKENS, device), use_cache=False)
    return list(zip(seen.select, seen.mla, strict=True))


def sets(picks):
    """bool[B, t, S] of the rows that see more than K slots."""
    chosen = torch.zeros(picks.shape[0], TOKENS, TOKENS + 1, dtype=torch.bool, device=picks.device)
    return chosen.scatter_(-1, picks.long().clamp(-1).where(picks >= 0, TOKENS), True)[:, TOPK:, :TOKENS]


def mass(mla, chosen):
    """Mean attention probability over heads that lies on the chosen slots."""
    q, c_kv, k_pe, weight, visible, _, _, nope, scale = mla[:9]
    key, _ = expand_keys(q, c_kv, k_pe, weight, nope)
    probs, _ = attend(
        q.to(key.dtype) @ key.transpose(-1, -2) * scale, kept(visible, None, slice(None), TOKENS, q)[:, None]
    )
    return (probs.mean(1)[:, TOPK:] * chosen).sum(-1).mean().item()


@pytest.mark.parametrize("case", NATIVE)
def test_bf16_and_fp8_keep_what_their_rounding_allows(case, device):
    for (q, weights, keys, visible, mask, topk, scale, budget), mla in calls(case, device):
        assert topk == TOPK
        rest = visible, mask, topk, scale, budget
        codes, scales = quantise(keys)
        op, low = torch.ops.dsa.select.default, q.bfloat16()
        exact = sets(op(q, weights, keys, *rest))
        chosen = {
            "bf16": sets(op(low, weights, keys.bfloat16(), *rest)),
            "fp8": sets(op(low, weights, codes, *rest, None, scales)),
        }
        rounded = {
            "bf16": sets(select(low.double(), weights, keys.bfloat16().double(), *rest)),
            "fp8": sets(select(low.double(), weights, codes, *rest, None, scales)),
        }
        for name, picked in chosen.items():
            recall = ((picked & exact).sum() / exact.sum()).item()
            print(f"{case} {name}: recall {recall:.4f}, mass {mass(mla, picked):.4f} of {mass(mla, exact):.4f}")
            # the same rounding picks the same set, but for scores that lie closer than a sum's order tells apart
            assert (picked & rounded[name]).sum() >= 0.998 * exact.sum()
            assert recall >= (0.99 if name == "bf16" else 0.95)
