"""An evaluation's numbers are those of the definition, and its file vouches for the plan that it is of."""

import copy
import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import TOPK, stock, token_ids
from oracles import float64_copy
from rich.console import Console
from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer
from transformers.masking_utils import sdpa_mask

import dsa_compile
from dsa_compile.errors import ConfigError, InputError
from dsa_compile.models.miniature import miniature
from dsa_compile.replanning import Replanned

EXACT = {"selector": "attention", "index_topk": TOPK}


def by_definition(model, texts, sources):
    """Mass and overlap of each layer, and loss, past K: a row and a slot at a time."""
    own, attended = {}, {}
    mass, overlap = torch.zeros(2, len(sources), dtype=torch.float64)

    def attention(module, query, key, value, mask, scaling, **kwargs):
        layer, T = module.layer_idx, query.shape[2]
        future = torch.ones(T, T, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(future, -math.inf)
        mean = scores.softmax(-1).mean(1)[0]
        own[layer] = [set(sorted(range(t + 1), key=lambda s: (-mean[t, s], s))[:TOPK]) for t in range(T)]
        everything = [set(range(t + 1)) for t in range(T)]
        attended[layer] = everything if sources[layer] is None else own[sources[layer]]
        for t in range(TOPK, T):
            mass[layer] += sum(mean[t, s].item() for s in attended[layer][t])
            if layer and None not in (sources[layer], sources[layer - 1]):
                overlap[layer] += len(attended[layer][t] & attended[layer - 1][t]) / TOPK
        left_out = torch.tensor([[s not in attended[layer][t] for s in range(T)] for t in range(T)])
        probs = scores.masked_fill(left_out.to(query.device), -math.inf).softmax(-1)
        return (probs @ value).transpose(1, 2), None

    AttentionInterface.register("by_definition", attention)
    AttentionMaskInterface.register("by_definition", sdpa_mask)
    twin = float64_copy(model)
    twin.set_attn_implementation("by_definition")
    losses = []
    for ids in texts:
        with torch.no_grad():
            logits = twin(ids[None], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[TOPK:-1], ids[TOPK + 1 :], reduction="none"))
    rows = sum(len(ids) - TOPK for ids in texts)
    return (mass / rows).tolist(), (overlap / rows).tolist(), torch.cat(losses).mean().item()


def test_figures_are_those_of_the_definition(device):
    model = miniature("deepseek_v3", dtype=torch.float64, num_hidden_layers=4).to(device)
    texts = [token_ids(1, length, device)[0] for length in (3 * TOPK, 3 * TOPK + 5)]
    found = dsa_compile.evaluate_plan(model, texts, needles=0, plan=["own", "from:0", "own", "dense"], **EXACT)
    assert (found.sources, found.rows) == ((0, 0, 2, None), sum(len(ids) - TOPK - 1 for ids in texts))
    for run, sources in ((found.own, (0, 1, 2, 3)), (found.plan, found.sources), (found.dense, (None,) * 4)):
        mass, overlap, loss = by_definition(model, texts, sources)
        assert run.mass == pytest.approx(mass, abs=1e-9)
        assert [share or 0 for share in run.overlap] == pytest.approx(overlap, abs=1e-9)
        assert run.loss == pytest.approx(loss, abs=1e-9)
        assert run.perplexity == pytest.approx(math.exp(loss))
    assert found.plan.overlap[1] == 1
    assert (found.plan.overlap[0], found.plan.overlap[3]) == (None, None)
    assert found.dense.mass == (1, 1, 1, 1)


@pytest.fixture
def invented(monkeypatch):
    """Dense logits are right; under the model's own plan that of the last token is wrong, under others the first's."""

    def logits(self, ids, plan):
        right = F.one_hot(ids.roll(-1), 4096).float()
        if plan == self.own:
            right[-2] = 0
        elif plan.reuses:
            right[0] = 0
        return right

    monkeypatch.setattr(Replanned, "logits", logits)
    monkeypatch.setattr(Replanned, "measured", lambda self, *row: (self.logits(*row), torch.zeros(3, 2)))


@pytest.fixture
def texts(device):
    return [token_ids(1, 3 * TOPK, device)[0]]


def test_a_needle_is_recalled_where_greedy_decoding_begins_with_its_code(texts, device, invented, pytestconfig):
    tokenizer = AutoTokenizer.from_pretrained(pytestconfig.rootpath / "examples" / "tinyseek-4m")
    found = dsa_compile.evaluate_plan(
        stock("deepseek_v32", device), texts, needles=3, plan="mli", tokens=100, tokenizer=tokenizer
    )
    assert (found.dense.recalled, found.own.recalled, found.plan.recalled) == (3, 0, 3)


def test_tables_and_file_say_what_was_measured(texts, device, invented, tmp_path):
    fields = {"needles": 0, "plan": "mli", "layer0": "previous_step"}
    found = dsa_compile.evaluate_plan(stock("deepseek_v32", device), texts, **fields)
    found.save(tmp_path / "mli.json")
    record = json.loads((tmp_path / "mli.json").read_text())
    assert record["of"] == found.subject
    assert (record["of"]["index_topk"], record["of"]["plan"]) == (TOPK, ["previous_step", "from:0", "from:1"])
    assert {name: record[name]["loss"] for name in ("dense", "own", "plan")} == {
        "dense": found.dense.loss,
        "own": found.own.loss,
        "plan": found.plan.loss,
    }
    console = Console(width=100)
    with console.capture() as shown:
        console.print(found)
    for text in ("plan LLS", "its own, a token late", "layer 1", f"{found.own.loss:.4f}", "0 of 0"):
        assert text in shown.get()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"needles": 1}, InputError, "needles: they are text and need tokenizer="),
        ({"needles": -1}, ConfigError, "needles: expected at least 0"),
        ({"plan": "share:FS"}, ConfigError, "each of 3 layers, came 2"),
        ({"selector": "dense"}, ConfigError, "on a model that selects"),
        ({"index_topk": 3 * TOPK - 1}, InputError, "text 0 of 1"),
    ],
)
def test_what_cannot_be_evaluated_is_named(fields, error, words, texts, device):
    with pytest.raises(error, match=words):
        dsa_compile.evaluate_plan(stock("deepseek_v32", device), texts, **{"needles": 0} | fields)


@pytest.fixture
def evaluated(texts, device, invented, tmp_path):
    dsa_compile.evaluate_plan(stock("deepseek_v32", device), texts, needles=0, plan="mli").save(tmp_path / "mli.json")
    return tmp_path / "mli.json"


@pytest.mark.parametrize(
    ("call", "plan"),
    [
        (dsa_compile.optimize, "mli"),
        (dsa_compile.prepare, ["own", "from:0", "from:1"]),
        (dsa_compile.explain, "mli"),
    ],
)
def test_a_plan_that_was_evaluated_is_not_warned_of(call, plan, evaluated, device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(copy.deepcopy(stock("deepseek_v32", device)), plan=plan, evaluation=evaluated)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"plan": "share:FFS"}, r"plan: expected \['own', 'own', 'from:1'\], came \['own', 'from:0', 'from:1'\]"),
        ({"plan": None}, "plan: expected"),
        ({"index_topk": 4}, "index_topk: expected 4, came 8"),
        ({"selector": "attention"}, "selector: expected 'attention', came 'indexer'"),
        ({"evaluation": "no/such.json"}, r"no/such\.json: cannot be read as JSON"),
    ],
)
def test_an_evaluation_of_something_else_vouches_for_nothing(fields, words, evaluated, device):
    model = copy.deepcopy(stock("deepseek_v32", device))
    with pytest.raises(ConfigError, match=words):
        dsa_compile.optimize(model, **{"plan": "mli", "evaluation": evaluated} | fields)
    assert type(model) is type(stock("deepseek_v32", device))


@pytest.mark.parametrize("name", ["indexer.wk", "o_proj"])
def test_an_evaluation_is_of_one_set_of_weights(name, evaluated, device):
    model = copy.deepcopy(stock("deepseek_v32", device))
    model.get_submodule(f"model.layers.1.self_attn.{name}").weight.data.mul_(2)
    with pytest.raises(ConfigError, match="plan evaluation of something else: weights: expected"):
        dsa_compile.optimize(model, plan="mli", evaluation=evaluated)
