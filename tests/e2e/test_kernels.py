"""On a GPU an optimized model runs the Triton templates, and says what the references say."""

from unittest import mock

import pytest
import torch
from cases import FAMILIES, TOPK, each_unlike, left_padded, optimized, token_ids
from torch._inductor.utils import run_and_get_code

import dsa_compile
from dsa_compile.lowering.sparse_mla import configs
from dsa_compile.needles import make_needles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
KERNEL = "from dsa_compile.lowering.sparse_mla.kernel import attend"


def generate(model, ids, mask):
    return model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=-1)


@each_unlike(FAMILIES)
def test_templates_give_the_tokens_of_the_references(case, device, recwarn):
    ids, mask = token_ids(3, 3 * TOPK, device), left_padded(3, 3 * TOPK, device)["attention_mask"]
    with mock.patch.object(configs, "refusal", return_value="a test wants the reference"):
        want = generate(optimized(case, device), ids, mask)
    recwarn.clear()
    model = optimized(case, device, lowering="inductor")
    model.set_experts_implementation("batched_mm")
    tokens, codes = run_and_get_code(generate, model, ids, mask)
    assert torch.equal(tokens, want)
    assert torch.equal(generate(optimized(case, device), ids, mask), want)  # the same kernels without Inductor
    assert sum(KERNEL in code for code in codes) == (2 if case in ("deepseek_v32", "glm_moe_dsa") else 1)
    assert not [w for w in recwarn if "runs as its reference" in str(w.message)]


@pytest.mark.parametrize("cache", [None, {"dtype": "fp8"}], ids=["bf16", "fp8"])
@pytest.mark.parametrize("lowering", ["inductor", "eager"])
def test_tinyseek_answers_as_with_the_references(cache, lowering, device, pytestconfig):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = pytestconfig.rootpath / "examples" / "tinyseek-4m"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    needles = make_needles(6, 1500, lambda text: len(tokenizer(text).input_ids))
    batch = tokenizer([tokenizer.bos_token + n.prompt for n in needles], padding=True, return_tensors="pt").to(device)

    def answers(lowering):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
        fields = {} if cache is None else {"cache": cache}
        dsa_compile.optimize(model, selector="attention", index_topk=128, lowering=lowering, **fields)
        tokens = model.generate(**batch, max_new_tokens=6, do_sample=False)
        said = tokenizer.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        return [text.strip().partition(".")[0] for text in said]

    ours = answers(lowering)
    with mock.patch.object(configs, "refusal", return_value="a test wants the reference"):
        assert ours == answers("eager")
    assert sum(said == n.code for said, n in zip(ours, needles)) >= 5
