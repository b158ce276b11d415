"""The search gives up the indexers that cost least, says what each step costs, and goes on where it was killed."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import TOPK, stock, token_ids
from oracles import rewired

import dsa_compile
from dsa_compile.errors import ConfigError, InputError
from dsa_compile.plan import plan_of
from dsa_compile.replanning import Replanned
from dsa_compile.search import greedy


@pytest.fixture
def texts(device):
    return [*token_ids(2, 5 * TOPK, device, seed=2)]


@pytest.fixture
def invented(monkeypatch):
    """Logits are random and of a plan alone; the list says of which plans they were asked."""
    asked = []

    def logits(self, ids, plan):
        asked.append(plan.letters)
        generator = torch.Generator().manual_seed(int.from_bytes(plan.letters.encode()))
        return torch.randn(len(ids), self.model.config.vocab_size, generator=generator)

    monkeypatch.setattr(Replanned, "logits", logits)
    return asked


@pytest.mark.parametrize("prefix", ["share:", "mli+share:"])
def test_the_search_finds_the_best_of_all_plans(prefix, texts, device):
    model, ids = stock("deepseek_v32", device, 4), torch.stack(texts)

    def loss(plan, index_topk=TOPK):
        twin = rewired(model, plan_of(plan, [True] * 4).sources)
        for layer in twin.model.layers:
            layer.self_attn.indexer.index_topk = index_topk
        with torch.no_grad():
            logits = twin(ids, use_cache=False).logits
        return F.cross_entropy(logits[:, TOPK:-1].flatten(0, 1), ids[:, TOPK + 1 :].flatten()).item()

    plans = [f"{prefix}F{''.join(rest)}" for rest in itertools.product("FS", repeat=3)]
    losses = {plan: loss(plan) for plan in plans}
    found = dsa_compile.search_plan(model, texts, retention=1 / 4, mli=prefix.startswith("mli"), tokens=len(texts[0]))
    assert [point.retention for point in found.curve] == [1, 3 / 4, 1 / 2, 1 / 4]
    for point in found.curve:
        shared = point.plan.count("S")
        assert losses[point.plan] == min(value for plan, value in losses.items() if plan.count("S") == shared)
        assert point.loss == pytest.approx(losses[point.plan], abs=1e-6)
    assert found.plan == f"{prefix}FSSS"
    assert found.own == pytest.approx(loss("own"), abs=1e-6)
    assert found.dense == pytest.approx(loss("own", index_topk=ids.shape[1]), abs=1e-6)


def steps(layers, keep, cost, blocks=None):
    """Patterns of `greedy` where layers that share cost the square of the sum of their ``cost``."""
    seen = greedy(
        (True,) * layers,
        blocks or [range(1, layers)],
        keep,
        lambda runs: sum(c for c, run in zip(cost, runs) if not run) ** 2,
    )
    return ["".join("FS"[not run] for run in runs) for runs, _ in seen]


def test_a_layer_a_step_shares_the_cheapest_first_and_of_equals_the_first():
    assert steps(4, 1, [0, 3, 1, 1]) == ["FFFF", "FFSF", "FFSS", "FSSS"]
    assert steps(4, 4, [0, 3, 1, 1]) == ["FFFF"]


def test_a_step_in_blocks_takes_a_layer_of_each_and_the_last_step_the_cheapest():
    blocks, cost = [range(1, 3), range(4, 6)], [0, 2, 1, 0, 3, 4]
    assert steps(6, 2, cost, blocks) == ["FFFFFF", "FFSFSF", "FSSFSS"]
    assert steps(6, 3, cost, blocks) == ["FFFFFF", "FFSFSF", "FSSFSF"]


def test_the_first_layer_of_a_block_keeps_its_indexer(texts, device, invented):
    found = dsa_compile.search_plan(stock("deepseek_v32", device, 5), texts, retention=2 / 5, mli=False, blocks=2)
    assert [point.plan.count("S") for point in found.curve] == [0, 2, 3]
    assert found.plan == "share:FSFSS"


def test_layers_that_share_in_the_model_are_left_and_layer_0_keeps_its_own(texts, device, invented):
    found = dsa_compile.search_plan(stock("glm_moe_dsa", device), texts, retention=0.01, mli=False)
    assert [point.plan for point in found.curve] == ["share:FSF", "share:FSS"]
    assert [point.retention for point in found.curve] == [2 / 3, 1 / 3]
    assert found.curve[0].loss == found.own


def test_a_search_that_is_killed_at_any_step_goes_on_where_it_was(texts, device, tmp_path, monkeypatch, invented):
    def search(name):
        return dsa_compile.search_plan(
            stock("deepseek_v32", device, 4), texts, retention=1 / 2, mli=False, state=tmp_path / name
        )

    want, logits = search("whole"), Replanned.logits
    every = len(invented)
    assert every == len(texts) * len(set(invented)) == len(texts) * (1 + 1 + 3 + 2)
    for step in range(every):

        def killed(self, ids, plan, step=step):
            if len(invented) == step:
                raise KeyboardInterrupt
            return logits(self, ids, plan)

        invented.clear()
        monkeypatch.setattr(Replanned, "logits", killed)
        with pytest.raises(KeyboardInterrupt):
            search(f"{step}")
        monkeypatch.setattr(Replanned, "logits", logits)
        assert search(f"{step}") == want
        assert len(invented) == every + step % len(texts)
        assert (tmp_path / f"{step}").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"retention": 0}, ConfigError, r"retention: expected a share of the layers in \(0, 1\], came 0"),
        ({"retention": 1.5}, ConfigError, "came 1.5"),
        ({"retention": float("nan")}, ConfigError, "came nan"),
        ({"plan": "mli"}, ConfigError, "search_plan finds the plan"),
        ({"layer0": "dense"}, ConfigError, "search_plan finds the plan"),
        ({"blocks": 0}, ConfigError, "blocks: expected 1 to 2"),
        ({"blocks": 3}, ConfigError, "leaves 2 of 3; came 3"),
        ({"index_topk": 5 * TOPK - 1}, InputError, "text 0 of 2: expected at least K"),
        ({"tokens": TOPK + 1}, ConfigError, "tokens: expected at least"),
    ],
)
def test_what_cannot_be_searched_is_named(fields, error, words, texts, device):
    with pytest.raises(error, match=words):
        dsa_compile.search_plan(stock("deepseek_v32", device), texts, **{"retention": 0.5} | fields)


def test_a_state_of_another_search_is_named(texts, device, tmp_path, invented):
    def search(path, **fields):
        return dsa_compile.search_plan(
            stock("deepseek_v32", device), state=tmp_path / path, **{"texts": texts, "retention": 1} | fields
        )

    search("state.json")
    differing = [({"index_topk": 4}, "index_topk: expected 4, came 8"), ({"texts": texts[:1]}, "texts: expected")]
    differing.append(({"selector": "attention"}, "selector: expected 'attention', came 'indexer'"))
    for fields, words in differing:
        with pytest.raises(ConfigError, match=rf"state\.json: plan losses of something else: {words}"):
            search("state.json", **fields)
    with pytest.raises(ConfigError, match="state: expected a file in a folder that exists"):
        search("no/state.json")


def test_a_loss_that_is_no_number_is_named(texts, device, monkeypatch):
    monkeypatch.setattr(Replanned, "logits", lambda self, ids, plan: torch.full((len(ids), 128), torch.nan))
    with pytest.raises(InputError, match="their loss under the plan DDD is nan"):
        dsa_compile.search_plan(stock("deepseek_v32", device), texts)
