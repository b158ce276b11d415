"""bfloat16: never further from float64 than transformers' own bfloat16, beyond rounding."""

import copy

import pytest
import torch
from cases import FAMILIES, NATIVE, each_unlike, left_padded, optimized, stock, token_ids
from oracles import float64_copy

import dsa_compile
from dsa_compile.models.miniature import miniature

MEAN, TAIL, WORST = 1.1, 1.2, 2.0
"""Two bf16 computations are two draws of the same rounding: means agree closely, single extremes do not."""


def assert_error_bounded(error, eager):
    assert error.mean() <= MEAN * eager.mean()
    assert error.quantile(0.999) <= TAIL * eager.quantile(0.999)
    assert error.max() <= WORST * eager.max()


@each_unlike(FAMILIES)
def test_bf16_error_is_bounded_by_that_of_eager_bf16(case, device):
    family, overrides = FAMILIES[case]
    # every key and every expert is chosen, so that no rounding of a score can change a set
    overrides = overrides | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}
    wide = {"index_topk": 64} if family in NATIVE else {}
    fields = {} if family in NATIVE else {"selector": "dense"}
    errors, eager = {False: [], True: []}, []
    for seed in range(3):
        low = miniature(family, dtype=torch.bfloat16, seed=seed, **overrides, **wide).to(device)
        model = dsa_compile.optimize(copy.deepcopy(low), lowering="eager", **fields)
        ids, inputs = token_ids(3, 48, device, seed), left_padded(3, 48, device)
        mask = inputs["attention_mask"].bool()
        with torch.no_grad():
            want = float64_copy(low)(ids, use_cache=False, **inputs).logits[mask]
            eager.append((low(ids, use_cache=False, **inputs).logits[mask].double() - want).abs())
            for cached, found in errors.items():
                found.append((model(ids, use_cache=cached, **inputs).logits[mask].double() - want).abs())
    for found in errors.values():
        assert_error_bounded(torch.cat(found).flatten(), torch.cat(eager).flatten())


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v32"])
def test_generate_in_bf16_runs_from_the_latent_cache(case, device):
    model = optimized(case, device).to(torch.bfloat16)
    ids = token_ids(2, 20, device)
    out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1, return_dict_in_generate=True)
    assert out.sequences.shape == (2, 28)
    assert out.past_key_values.dtype == torch.bfloat16
    assert stock(case, device).dtype == torch.float32
