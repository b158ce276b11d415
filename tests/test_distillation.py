"""A warm-up lowers its loss, goes on where it was killed, and stops at what is no number."""

import copy
import warnings

import pytest
import torch
from cases import TOPK, stock, stock_without_experts
from mtp import mtp_weights
from transformers import TrainerCallback, TrainingArguments

import dsa_compile
from dsa_compile.distillation import LAYERS, NEXT_TOKEN, warmup
from dsa_compile.errors import ConfigError, InputError, TrainingError
from dsa_compile.student import Student

STEPS, LENGTH = 4, 3 * TOPK
SIZES = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": TOPK}


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 128, (LENGTH,), generator=generator)} for _ in range(32)]


@pytest.fixture
def train(device, rows, tmp_path):
    def run(name="run", *, model=None, data=None, options=None, **fields):
        arguments = {
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 5e-3,
            "logging_steps": 1,
            "save_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": device.type == "cpu",
            "save_total_limit": 2,
        }
        return warmup(
            model or stock("deepseek_v3", device, 1),
            rows if data is None else data,
            TrainingArguments(str(tmp_path / name), **arguments | fields),
            **SIZES | (options or {}),
        )

    return run


def joint(train, device, name="joint", **fields):
    """A model that learned with its indexers, and what was found."""
    model = copy.deepcopy(stock("deepseek_v3", device, 1))
    callbacks = fields.pop("callbacks", ())
    options = {"indexer": "random", "sparse": True, "train_all": True, "callbacks": callbacks}
    return model, train(name, model=model, options=options, **fields)


def losses(found):
    return [entry["loss"] for entry in found.log if "loss" in entry]


class Killed(TrainerCallback):
    """Raises in the middle of a step, or behind it when its checkpoint is half written."""

    def __init__(self, step, event):
        self.step, self.event = step, event

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if (self.event, self.step) == ("step", state.global_step):
            raise KeyboardInterrupt

    def on_save(self, args, state, control, **kwargs):
        if (self.event, self.step) == ("save", state.global_step):
            checkpoint = f"{args.output_dir}/checkpoint-{state.global_step}"
            with open(f"{checkpoint}/trainer_state.json", "r+") as file:
                file.truncate(10)
            raise KeyboardInterrupt


def test_a_run_that_is_killed_at_any_step_goes_on_to_the_same_losses(train, device):
    fields = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    mtp = {"mtp": {"module": mtp_weights("deepseek_v3", device)}}
    whole = train("whole", options=mtp, **fields)
    assert len(losses(whole)) == STEPS
    assert {name.split(".")[2] for name in whole.indexers} == {"0", "1"}
    assert len(whole.divergences) == 2
    for step, event in ((1, "step"), (3, "save")):
        with pytest.raises(KeyboardInterrupt):
            train(f"{step}", options=mtp | {"callbacks": [Killed(step, event)]}, **fields)
        again = train(f"{step}", options=mtp, **fields)
        assert losses(again) == pytest.approx(losses(whole), abs=1e-5)
        for name, tensor in whole.indexers.items():
            torch.testing.assert_close(again.indexers[name], tensor, rtol=0, atol=1e-5)


def test_a_finished_run_is_not_trained_again_and_another_run_is_not_resumed(train, rows, device):
    first = train()
    same = train()
    assert (losses(same), same.divergences) == (losses(first), first.divergences)
    assert all(torch.equal(same.indexers[name], t) for name, t in first.indexers.items())
    for other, words in (
        ({"seed": 1}, "seed: expected 1, came 42"),
        ({"data": rows[:8]}, "rows: expected 8, came 32"),
        ({"options": {"sparse": True}}, "sparse: expected True, came False"),
        ({"options": {"temperature": 2.0}}, "temperature: expected 2.0, came 1.0"),
        ({"options": {"mtp": {"module": mtp_weights("deepseek_v3", device)}}}, "mtp: expected '[0-9a-f]+', came None"),
    ):
        with pytest.raises(ConfigError, match=rf"warmup\.json: warm-up of something else: {words}"):
            train(**other)
    assert losses(train(options={"resume": False}, seed=1)) != losses(first)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_training_lowers_the_divergence_and_the_indexers_fit_the_model(precision, train, device):
    model = copy.deepcopy(stock("deepseek_v3", device, 1)).to(torch.bfloat16 if precision else torch.float32)
    found = train(model=model, max_steps=40, save_strategy="no", learning_rate=1e-2, **precision)
    curve = losses(found)
    assert sum(curve[-8:]) < 0.8 * sum(curve[:8])
    assert (found.plan.letters, found.index_topk, len(found.divergences)) == ("F", TOPK, 1)
    sparse = dsa_compile.optimize(copy.deepcopy(model), indexer=found.indexers, index_topk=TOPK, lowering="eager")
    loaded = sparse.model.layers[0].self_attn.indexer.state_dict()
    prefix = "model.layers.0.self_attn.indexer."
    assert {name: True for name in loaded} == {
        name.removeprefix(prefix): torch.equal(t, loaded[name.removeprefix(prefix)])
        for name, t in found.indexers.items()
    }


def test_indexers_of_a_plan_are_enough_for_a_model_under_that_plan(train, device):
    model, plan = stock_without_experts("deepseek_v3", device), ["own", "own", "from:1"]
    found = train(model=model, max_steps=1, options={"plan": plan})
    assert {name.split(".")[2] for name in found.indexers} == {"0", "1"}
    second = {"plan": plan, "indexer": found.indexers, "sparse": True, "retrain": True}
    assert train("second", model=model, max_steps=1, options=second).indexers.keys() == found.indexers.keys()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plan=")
        sparse = dsa_compile.optimize(copy.deepcopy(model), indexer=found.indexers, plan=plan, lowering="eager")
    assert sparse.dsa.plan == found.plan
    with pytest.raises(dsa_compile.errors.IndexerWeightsError, match=r"found none for layers \[2\]"):
        dsa_compile.optimize(copy.deepcopy(model), indexer=found.indexers)


def test_a_loss_that_is_no_number_stops_the_run_at_its_step_and_layer(train, monkeypatch, tmp_path):
    forward, calls = Student.forward, []

    def broken(self, input_ids):
        outputs = forward(self, input_ids)
        calls.append(1)
        if len(calls) == 4:
            outputs["layers"][0] = torch.nan
        return outputs

    monkeypatch.setattr(Student, "forward", broken)
    with pytest.raises(TrainingError, match=r"step 4: .* divergence of layers \[0\] is not.*run/checkpoint-3\."):
        train()
    assert sorted(p.name for p in tmp_path.glob("run/checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


def test_a_model_that_learns_with_its_indexers_lowers_both_losses(train, device, rows):
    model, found = joint(train, device, data=rows[:2], max_steps=30, save_strategy="no", learning_rate=1e-3)
    steps = [entry for entry in found.log if "loss" in entry]
    for curve in ([sum(step[LAYERS]) for step in steps], [step[NEXT_TOKEN] for step in steps]):
        assert sum(curve[-5:]) < 0.95 * sum(curve[:5])
    before = stock("deepseek_v3", device, 1).state_dict()
    assert {n for n, t in model.state_dict().items() if torch.equal(t, before[n])} <= {n for n in before if "bias" in n}


def test_a_model_learns_though_a_trainer_moves_its_parameters(train, device):
    class Moved(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            for parameter in model.learning.values():
                parameter.data = parameter.data.clone()

    (apart, _), (whole, _) = joint(train, device, "moved", callbacks=[Moved()]), joint(train, device)
    assert all(torch.equal(t, whole.state_dict()[name]) for name, t in apart.state_dict().items())


def test_a_joint_run_that_is_killed_goes_on_to_the_same_weights(train, device):
    whole, found = joint(train, device, "whole")
    with pytest.raises(KeyboardInterrupt):
        joint(train, device, "killed", callbacks=[Killed(2, "step")])
    again, same = joint(train, device, "killed")
    finished, _ = joint(train, device, "killed")
    assert losses(same) == pytest.approx(losses(found), abs=1e-5)
    for other in (again, finished):
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="warm-up of something else: train_all: expected False, came True"):
        train("killed", options={"sparse": True})


def test_a_model_whose_loss_is_no_number_stops_the_run(train, device, tmp_path):
    class Broken(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            if state.global_step == 2:
                model.learning["lm_head/weight"].data[0, 0] = torch.inf

    with pytest.raises(TrainingError, match=r"step 3: .* loss of the next token is not.*joint/checkpoint-2\."):
        joint(train, device, callbacks=[Broken()])


def test_a_weight_that_is_no_number_is_not_saved(train, tmp_path):
    class Broken(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            if state.global_step == 2:
                model.indexers["0"].wk.weight.grad.fill_(torch.inf)

    with pytest.raises(TrainingError, match=r"step 3: .* weights indexers\.0\.wk\.weight are not.*run/checkpoint-2\."):
        train(options={"callbacks": [Broken()]})
    assert not (tmp_path / "run" / "checkpoint-3").exists()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"data": []}, InputError, "K = 8 tokens, came 0 rows of at most 0: nothing would be sparse"),
        ({"options": {"index_topk": LENGTH}}, InputError, "K = 24 tokens, came 32 rows of at most 24"),
        ({"options": {"plan": "share:1/4+share:1/2"}}, ConfigError, "at most one of own, share"),
        ({"options": {"plan": "last"}}, ConfigError, "plan: unknown 'last'"),
        ({"options": {"plan": ["dense"]}}, ConfigError, "no layer attends with an indexer"),
        ({"options": {"train_all": True}, "fsdp": True}, ConfigError, "train_all: .* came fsdp or deepspeed"),
        ({"options": {"indexer": {}}}, ConfigError, "has trained indexers .* Give retrain=True"),
    ],
)
def test_what_cannot_be_trained_is_named(fields, error, words, train):
    with pytest.raises(error, match=words):
        train(**fields)


@pytest.mark.parametrize("short", ["attention_mask", "position_ids"])
def test_what_a_query_sees_counts_not_what_a_row_holds(short, train):
    row = {"input_ids": torch.ones(LENGTH, dtype=torch.int64)}
    visible = torch.arange(LENGTH) % TOPK if short == "position_ids" else (torch.arange(LENGTH) < TOPK).long()
    with pytest.raises(InputError, match=f"came 1 rows of at most {TOPK}"):
        train(data=[row | {short: visible}])


def test_a_model_with_indexers_is_trained_again_only_if_asked(train, device):
    model = stock("deepseek_v32", device, 1)
    with pytest.raises(ConfigError, match=r"DeepseekV32ForCausalLM has trained indexers .* Give retrain=True"):
        train(model=model)
    found = train(model=model, max_steps=1, learning_rate=0, options={"retrain": True})
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in found.indexers.items())
