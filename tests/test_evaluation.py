"""An evaluation's numbers are those of the definition, and its file vouches for the plan that it is of."""

import argparse
import copy
import json
import math
import warnings
from itertools import compress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import TOPK, stock, token_ids
from oracles import float64_copy
from rich.console import Console
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import sdpa_mask

import dsa_compile
from dsa_compile import curve, evaluation, evaluation_pictures
from dsa_compile.errors import ConfigError, InputError
from dsa_compile.haystack import NeedleSuite
from dsa_compile.models.miniature import miniature
from dsa_compile.replanning import Replanned

EXACT = {"selector": "attention", "index_topk": TOPK}


def by_definition(model, texts, sources):
    """Mass, exact mass, recall and overlap of each layer, loss and likeliest tokens past K, a slot at a time."""
    own, attended = {}, {}
    mass, exact, recall, overlap = figures = torch.zeros(4, len(sources), dtype=torch.float64)

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
            exact[layer] += sum(mean[t, s].item() for s in own[layer][t])
            recall[layer] += len(attended[layer][t] & own[layer][t]) / TOPK
            if layer and None not in (sources[layer], sources[layer - 1]):
                overlap[layer] += len(attended[layer][t] & attended[layer - 1][t]) / TOPK
        left_out = torch.tensor([[s not in attended[layer][t] for s in range(T)] for t in range(T)])
        probs = scores.masked_fill(left_out.to(query.device), -math.inf).softmax(-1)
        return (probs @ value).transpose(1, 2), None

    AttentionInterface.register("by_definition", attention)
    AttentionMaskInterface.register("by_definition", sdpa_mask)
    twin = float64_copy(model)
    twin.set_attn_implementation("by_definition")
    with torch.no_grad():
        logits = torch.cat([twin(ids[None], use_cache=False).logits[0, TOPK:-1] for ids in texts])
    loss = F.cross_entropy(logits, torch.cat([ids[TOPK + 1 :] for ids in texts])).item()
    return (figures / sum(len(ids) - TOPK for ids in texts)).tolist(), loss, logits.argmax(-1)


def test_figures_are_those_of_the_definition(device):
    model = miniature("deepseek_v3", dtype=torch.float64, num_hidden_layers=4).to(device)
    texts = [token_ids(1, length, device)[0] for length in (3 * TOPK, 3 * TOPK + 5)]
    found = dsa_compile.evaluate(model, texts, needles=None, plan=["own", "from:0", "own", "dense"], **EXACT)
    assert (found.plan.sources, found.rows) == ((0, 0, 2, None), sum(len(ids) - TOPK - 1 for ids in texts))
    *_, likeliest = by_definition(model, texts, (None,) * 4)
    for run, sources in ((found.own, (0, 1, 2, 3)), (found.plan, (0, 0, 2, None)), (found.dense, (None,) * 4)):
        (mass, exact, recall, overlap), loss, said = by_definition(model, texts, sources)
        assert run.mass == pytest.approx(mass, abs=1e-9)
        selects = [source is not None for source in sources]
        assert [share for share in run.exact if share is not None] == pytest.approx([*compress(exact, selects)])
        assert [share is not None for share in run.exact] == selects
        assert run.recall == pytest.approx(recall, abs=1e-9)
        assert [share or 0 for share in run.overlap] == pytest.approx(overlap, abs=1e-9)
        assert run.loss == pytest.approx(loss, abs=1e-9)
        assert run.perplexity == pytest.approx(math.exp(loss))
        assert run.agreement == pytest.approx((said == likeliest).double().mean().item())
    assert found.plan.overlap[1] == 1
    assert (found.plan.overlap[0], found.plan.overlap[3]) == (None, None)
    assert found.dense.mass == found.dense.recall == (1, 1, 1, 1)
    assert found.own.exact == pytest.approx(found.own.mass)
    assert found.own.recall == pytest.approx((1, 1, 1, 1))
    assert found.own.agreement < 1 == found.dense.agreement


@pytest.fixture
def invented(monkeypatch):
    """Logits are right; nothing is measured of attention."""

    def measured(self, ids, plan):
        return F.one_hot(ids.roll(-1), 4096).float(), torch.zeros(3, 4)

    monkeypatch.setattr(Replanned, "measured", measured)


@pytest.fixture
def texts(device):
    return [token_ids(1, 3 * TOPK, device)[0]]


def test_without_a_plan_sparse_is_measured_beside_dense(texts, device, invented):
    found = dsa_compile.evaluate(stock("deepseek_v32", device), texts, needles=None)
    assert [*found.runs] == ["dense", "own"]
    assert found.subject["plan"] == ["own"] * 3


@pytest.fixture(scope="module")
def tinyseek(pytestconfig):
    return pytestconfig.rootpath / "examples" / "tinyseek-4m"


def test_codes_are_recalled_where_attention_reaches_them(device, tinyseek):
    model = AutoModelForCausalLM.from_pretrained(tinyseek, dtype=torch.float32).to(device)
    before = copy.deepcopy(model.state_dict())
    found = dsa_compile.evaluate(
        model,
        [Path(argparse.__file__).read_text()[:2000]],
        needles=NeedleSuite(kinds=("single", "multi-key"), depths=(0.2,)),
        tokens=200,
        tokenizer=AutoTokenizer.from_pretrained(tinyseek),
        selector="attention",
        index_topk=2,
    )
    assert found.answered == {"dense": (True, True), "own": (False, False)}
    assert found.recalled("dense", kind="single", length=200, depth=0.2) == (1, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tables_and_file_say_what_was_measured(texts, device, invented, tmp_path, tinyseek, monkeypatch):
    monkeypatch.setattr(evaluation, "answered", lambda questions, *rest: tuple(q.depth < 0.5 for q in questions))
    fields = {"plan": "mli", "layer0": "previous_step", "tokenizer": AutoTokenizer.from_pretrained(tinyseek)}
    suite = NeedleSuite(kinds=("single",), lengths=(64, 96), depths=(0.1, 0.9))
    found = dsa_compile.evaluate(stock("deepseek_v32", device), texts, needles=suite, **fields)
    found.save(tmp_path / "mli.json")
    record = json.loads((tmp_path / "mli.json").read_text())
    assert record["of"] == found.subject
    assert (record["of"]["index_topk"], record["of"]["plan"]) == (TOPK, ["previous_step", "from:0", "from:1"])
    for name, run in (("dense", found.dense), ("own", found.own), ("plan", found.plan)):
        assert (record[name]["loss"], record[name]["recalled"]) == (run.loss, 2)
    shared = {"kind": "single", "length": 64}
    assert record["questions"][:2] == [
        shared | {"depth": 0.1, "dense": True, "own": True, "plan": True},
        shared | {"depth": 0.9, "dense": False, "own": False, "plan": False},
    ]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(found)
    for text in (
        "plan LLS",
        "its own, a token late",
        "layer 1",
        f"{found.own.loss:.4f}",
        "+0.00%",
        "1 of 2",
        "100.00%",
    ):
        assert text in shown.get()
    pytest.importorskip("matplotlib")
    evaluation_pictures.draw(found, tmp_path)
    for name in ("mass.png", "needles.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_says_what_to_install(texts, device, invented, tmp_path, monkeypatch):
    found = dsa_compile.evaluate(stock("deepseek_v32", device), texts, needles=None)
    monkeypatch.setattr(curve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mass\.png: expected matplotlib .* pip install 'dsa_compile\[plot\]'"):
        evaluation_pictures.draw(found, tmp_path)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"needles": NeedleSuite()}, InputError, "needles: they are text and need tokenizer="),
        ({"plan": "share:FS"}, ConfigError, "each of 3 layers, came 2"),
        ({"selector": "dense"}, ConfigError, "on a model that selects"),
        ({"index_topk": 3 * TOPK - 1}, InputError, "text 0 of 1"),
    ],
)
def test_what_cannot_be_evaluated_is_named(fields, error, words, texts, device):
    with pytest.raises(error, match=words):
        dsa_compile.evaluate(stock("deepseek_v32", device), texts, **{"needles": None} | fields)


@pytest.fixture
def evaluated(texts, device, invented, tmp_path):
    dsa_compile.evaluate(stock("deepseek_v32", device), texts, needles=None, plan="mli").save(tmp_path / "mli.json")
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
