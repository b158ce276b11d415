"""One capture serves every plan, and each gives what a model optimized under it gives."""

import copy
import warnings

import pytest
import torch
from cases import TOPK, assert_rows_equal, optimized, stock, token_ids

import dsa_compile
from dsa_compile.config import DSAConfig
from dsa_compile.errors import ConfigError
from dsa_compile.plan import Plan
from dsa_compile.replanning import Replanned

INSERTED = {"indexer": "random", "index_topk": TOPK, "index_n_heads": 8, "index_head_dim": 16}


class Counted(Replanned):
    captures = 0

    def _capture(self, *args):
        self.captures += 1
        return super()._capture(*args)


def test_a_plan_after_another_is_the_model_optimized_under_it(device):
    replanned = Counted(stock("deepseek_v3", device), DSAConfig(**INSERTED))
    for wanted, length in (("mli", 2 * TOPK), (["own", "dense", "from:0"], 3 * TOPK + 1)):
        ids = token_ids(1, length, device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="plan=")
            want = optimized("deepseek_v3", device, selector="indexer", plan=wanted, **INSERTED)(ids, use_cache=False)
        assert_rows_equal(replanned.logits(ids[0], replanned.plan(wanted)), want.logits[0])
    dense = stock("deepseek_v3", device)(ids, use_cache=False).logits[0]
    assert_rows_equal(replanned.logits(ids[0], Plan((None,) * 3)), dense)
    assert replanned.captures == 1


def test_the_model_that_was_given_stays_as_it_is(device):
    model, other = stock("deepseek_v32", device), copy.deepcopy(stock("deepseek_v32", device))
    for parameter in other.parameters():
        parameter.data.mul_(2)
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    replanned = Replanned(model, DSAConfig(indexer=other.state_dict()))
    assert not isinstance(model, type(replanned.model))
    assert all(
        (t.data_ptr(), True) == (before[n][0], torch.equal(t, before[n][1])) for n, t in model.state_dict().items()
    )
    head = replanned.model.lm_head.weight
    assert (head.data_ptr(), head.requires_grad) == (model.lm_head.weight.data_ptr(), False)
    theirs, ours = (m.model.layers[0].self_attn.indexer.wk.weight for m in (other, replanned.model))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("fields", [{"selector": "dense"}, {"disable_passes": ["plan_selection"]}])
def test_what_has_no_plan_to_measure_is_refused(fields, device):
    with pytest.raises(ConfigError, match="plans are measured on a model that selects and with every pass"):
        Replanned(stock("deepseek_v32", device), DSAConfig(**fields))


def test_a_prepared_model_is_refused(device):
    model = dsa_compile.prepare(copy.deepcopy(stock("deepseek_v32", device)))
    with pytest.raises(ConfigError, match="is prepared already"):
        Replanned(model, DSAConfig())
