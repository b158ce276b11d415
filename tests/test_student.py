"""Indexers learn from the layers that attend with them, and from nothing else."""

import copy
import math

import pytest
import torch
from cases import TOPK, assert_rows_equal, left_padded, stock, stock_without_experts, token_ids
from mtp import LAYERS, mtp_weights, naive_rows
from oracles import float64_copy

import dsa_compile
from dsa_compile.config import DSAConfig
from dsa_compile.errors import ConfigError, InputError
from dsa_compile.lowering.select.projections import project
from dsa_compile.lowering.select.reference import index_scores
from dsa_compile.models.family import family_of
from dsa_compile.student import Student

HEADS, DIM = 4, 16
LENGTH = 3 * TOPK
OPTIONS = {"indexer": "random", "index_n_heads": HEADS, "index_head_dim": DIM, "index_topk": TOPK}


def student_of(model, **fields):
    return Student(model, DSAConfig(**OPTIONS | fields), seed=1)


def gradients(student, loss):
    names, parameters = zip(*student.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True)))


def targets_and_scores(model, student, ids):
    """From hooks on a stock model: targets [B, T, T] by layer, head-mean attention at 1, and the index scores."""
    model.set_attn_implementation("eager")
    seen = {}
    for name, module in model.named_modules():
        if name.endswith(("kv_a_proj_with_mqa", "q_b_proj", "q_proj")):
            module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
        if name.endswith("rotary_emb"):
            module.register_forward_hook(lambda _, args, out: seen.update(rope=out))
    with torch.no_grad():
        attentions = model(ids, output_attentions=True, use_cache=False).attentions
    cos, sin = seen["rope"] if isinstance(seen["rope"], tuple) else (seen["rope"].real, seen["rope"].imag)
    cos, sin = (torch.cat([x, x], -1).to(model.dtype) if x.shape[-1] < 8 else x for x in (cos, sin))
    scores = {}
    for layer, indexer in student.indexers.items():
        path = f"model.layers.{layer}.self_attn"
        q_latent = next(seen[f"{path}.{name}"] for name in ("q_b_proj", "q_proj") if f"{path}.{name}" in seen)
        read = seen[f"{path}.kv_a_proj_with_mqa"], q_latent, cos, sin
        scores[int(layer)] = scores_of(indexer, *read, layout=family_of(model).index_rope)
    flat = [(a.double() ** (1 / student.temperature)).sum(1) for a in attentions]
    return [p / p.sum(-1, keepdim=True) for p in flat], scores


def scores_of(indexer, x, q_latent, cos, sin, *, layout):
    """[B, T, T] that an indexer gives pairs of tokens, visible or not."""
    q, key, weights = project(
        x,
        q_latent,
        cos,
        sin,
        indexer.wq_b.weight,
        indexer.wk.weight,
        indexer.k_norm.weight,
        indexer.k_norm.bias,
        indexer.weights_proj.weight,
        n_heads=indexer.n_heads,
        head_dim=DIM,
        rope_dim=8,
        layout=layout,
    )
    return index_scores(q, weights.double(), key, DIM**-0.5)


def mtp_target_and_scores(case, model, student, ids):
    """`targets_and_scores` of the MTP layer, from a stock decoder layer on what the definition says that it reads."""
    deeper = float64_copy(stock(case, ids.device, LAYERS + 1))
    deeper.set_attn_implementation("eager")
    layer, seen = deeper.model.layers[LAYERS], {}
    weights = {name: t.double() for name, t in mtp_weights(case, ids.device).items() if t.is_floating_point()}
    attention = layer.self_attn
    attention.kv_a_proj_with_mqa.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    attention.q_b_proj.register_forward_pre_hook(lambda _, args: seen.update(q_latent=args[0]))
    attention.register_forward_hook(lambda _, __, output: seen.update(attention=output[1]))
    with torch.no_grad():
        rows = naive_rows(model, weights, model.model(ids[:, :-1]).last_hidden_state, ids[:, 1:])
        hidden = torch.full((rows.shape[1],) * 2, -torch.inf, dtype=rows.dtype, device=ids.device).triu(1)
        rope = model.model.rotary_emb(rows, position_ids=torch.arange(rows.shape[1], device=ids.device)[None])
        layer(rows, attention_mask=hidden[None, None], position_embeddings=rope)
    layout = family_of(model).index_rope
    scores = scores_of(student.indexers[str(LAYERS)], seen["x"], seen["q_latent"], *rope, layout=layout)
    return seen["attention"].mean(1), scores


def divergence(target, scores):
    """Mean over rows of KL(target || softmax(scores)), both [B, T, T] and causal."""
    hidden = torch.ones_like(target, dtype=torch.bool).triu(1)
    log_q = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0)
    return (torch.xlogy(target, target) - target * log_q).sum(-1).mean()


@pytest.mark.parametrize(
    ("case", "plan", "layers"),
    [
        ("deepseek_v2", "own", {0: [0], 1: [1], 2: [2]}),
        ("deepseek_v2_lite", "mli", {0: [0, 1], 1: [2]}),
        ("deepseek_v3", "mli", {0: [0, 1], 1: [2]}),
        ("deepseek_v3", ["dense", "own", "from:1"], {1: [1, 2]}),
        ("glm4_moe_lite", "share:FFS", {0: [0], 1: [1, 2]}),
    ],
)
def test_the_target_of_an_indexer_is_the_mean_attention_of_the_layers_that_attend_with_it(case, plan, layers, device):
    model, ids = float64_copy(stock_without_experts(case, device)), token_ids(2, LENGTH, device)
    student = student_of(model, plan=plan)
    targets, scores = targets_and_scores(copy.deepcopy(model), student, ids)
    assert scores.keys() == layers.keys()
    parts = [divergence(torch.stack([targets[i] for i in layers[j]]).mean(0), scores[j]) for j in layers]
    outputs = student(ids)
    ours, theirs = gradients(student, outputs["loss"]), gradients(student, sum(parts) / len(parts))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-9)
    each = {i: divergence(targets[i], scores[j]) for j in layers for i in layers[j]}
    torch.testing.assert_close(outputs["layers"], torch.stack([each[i] for i in student.taught]))


def test_a_temperature_flattens_what_each_layer_teaches(device):
    model, ids = float64_copy(stock_without_experts("deepseek_v3", device)), token_ids(2, LENGTH, device)
    student = Student(model, DSAConfig(**OPTIONS), seed=1, temperature=2.0)
    targets, scores = targets_and_scores(copy.deepcopy(model), student, ids)
    parts = [divergence(targets[layer], scores[layer]) for layer in student.taught]
    torch.testing.assert_close(student(ids)["layers"], torch.stack(parts))


@pytest.mark.parametrize("temperature", [0.5, -1.0, math.inf, math.nan])
def test_a_temperature_that_flattens_nothing_is_refused(temperature, device):
    with pytest.raises(ConfigError, match=f"temperature: expected at least 1 and finite, came {temperature}"):
        Student(stock("deepseek_v3", device), DSAConfig(**OPTIONS), seed=1, temperature=temperature)


@pytest.mark.parametrize(("case", "plan"), [("deepseek_v3", "mli"), ("glm4_moe_lite", ["own", "from:0"])])
def test_an_mtp_layer_learns_from_its_own_attention_whatever_the_plan(case, plan, device):
    model, ids = float64_copy(stock(case, device, LAYERS)), token_ids(2, LENGTH, device)
    student = student_of(model, plan=plan, mtp={"module": mtp_weights(case, device)})
    want = divergence(*mtp_target_and_scores(case, copy.deepcopy(model), student, ids))
    outputs = student(ids)
    torch.testing.assert_close(outputs["layers"][-1], want)
    ours, theirs = gradients(student, outputs["loss"]), gradients(student, want / len(student.indexers))
    learning = [name for name, gradient in theirs.items() if gradient is not None]
    assert {name.split(".")[1] for name in learning} == {str(LAYERS)}
    for name in learning:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("case", "learning"), [("deepseek_v32", {"0", "1", "3"}), ("glm_moe_dsa", {"0", "3"})])
def test_a_model_with_indexers_stays_as_it_is_while_copies_of_them_learn(case, learning, device):
    model = copy.deepcopy(stock_without_experts(case, device))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    mtp = mtp_weights(case, device) | model.model.layers[2].state_dict()
    student = student_of(model, plan="mli", indexer=None, mtp={"module": mtp})
    student(token_ids(2, LENGTH, device))["loss"].backward()
    assert set(student.indexers) == learning
    for parameter in student.parameters():
        assert parameter.grad.abs().sum() > 0
        parameter.data.zero_()
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_packed_documents_and_padding_teach_as_each_document_alone(device):
    model = float64_copy(stock("deepseek_v3", device, LAYERS))
    student = student_of(model, mtp={"module": mtp_weights("deepseek_v3", device)})
    ids, holes = token_ids(2, LENGTH, device), torch.ones(2, 3, dtype=torch.int64, device=device)
    alone = student(ids)["layers"]
    mask = torch.cat([0 * holes, torch.ones_like(ids)], 1)
    torch.testing.assert_close(student(torch.cat([holes, ids], 1), attention_mask=mask)["layers"], alone)
    positions = torch.arange(LENGTH, device=device).repeat(2)[None]
    packed = student(ids.view(1, -1), position_ids=positions, attention_mask=torch.ones_like(positions))
    torch.testing.assert_close(packed["layers"], alone)


def test_in_the_second_stage_layers_attend_to_what_the_indexers_select(device):
    model, ids = stock("deepseek_v3", device, 1), token_ids(2, LENGTH, device)
    learned = student_of(model).weights()
    dense, sparse, everything = (
        Student(model, DSAConfig(indexer=learned, index_topk=topk), 0, sparse=stage)
        for topk, stage in ((TOPK, False), (TOPK, True), (LENGTH, True))
    )
    outputs = [student(ids) for student in (dense, sparse, everything)]
    torch.testing.assert_close(outputs[2]["layers"], outputs[0]["layers"])
    ours = sparse.model(ids, use_cache=False).logits
    optimized = dsa_compile.optimize(copy.deepcopy(model), indexer=learned, index_topk=TOPK, lowering="eager")
    assert_rows_equal(ours, optimized(ids, use_cache=False).logits)
    assert (ours - dense.model(ids, use_cache=False).logits).abs().max() > 1e-3


def test_weights_are_kept_precisely_and_named_as_in_deepseek_v32(device):
    student = student_of(copy.deepcopy(stock("deepseek_v3", device, 1)).to(torch.bfloat16))
    assert {p.dtype for p in student.parameters()} == {torch.float32}
    assert student(token_ids(1, LENGTH, device))["loss"].dtype == torch.float32
    named = {n: t.shape[1:] for n, t in stock("deepseek_v32", device, 1).state_dict().items() if ".indexer." in n}
    assert {n: t.shape[1:] for n, t in student.weights().items()} == named
    assert {(t.dtype, "weights_proj" in n) for n, t in student.weights().items()} == {
        (torch.bfloat16, False),
        (torch.float32, True),
    }


def test_a_seed_makes_the_weights(device):
    model = stock("deepseek_v3", device)
    one, same, other = (Student(model, DSAConfig(**OPTIONS), seed) for seed in (1, 1, 2))
    name = "indexers.0.wk.weight"
    assert torch.equal(one.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))


def joint(model, **fields):
    """A model that learns with its indexers, and its parameters by their own names."""
    student = Student(model, DSAConfig(**{"index_topk": TOPK} | fields), seed=1, sparse=True, train_all=True)
    return student, {name.replace("/", "."): p for name, p in student.learning.items()}


@pytest.mark.parametrize(("case", "topk"), [("deepseek_v32", TOPK), ("deepseek_v3", LENGTH), ("glm_moe_dsa", TOPK)])
def test_the_next_token_teaches_the_model_and_nothing_else_and_divergence_the_indexers(case, topk, device):
    model, ids = float64_copy(stock(case, device, 2)), token_ids(2, LENGTH, device)
    dense = OPTIONS | {"index_topk": topk, "mtp": {"module": mtp_weights(case, device)}}
    fields = dense if case == "deepseek_v3" else {}
    student, learning = joint(model, **fields)
    outputs = student(ids)
    alone = Student(model, DSAConfig(**{"index_topk": topk} | fields), seed=1, sparse=True)
    kept = alone(ids)
    torch.testing.assert_close(outputs["loss"], kept["loss"] + outputs["next_token"])
    ours, theirs = (gradients(s, out["loss"]) for s, out in ((student, outputs), (alone, kept)))
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=0)

    stocked = copy.deepcopy(model).train(False)
    loss = stocked(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(outputs["next_token"], loss.detach())
    wanted = {name: p for name, p in stocked.named_parameters() if ".indexer." not in name}
    assert learning.keys() == wanted.keys()
    for name, gradient in zip(wanted, torch.autograd.grad(loss, wanted.values(), allow_unused=True)):
        found = ours[f"learning.{name.replace('.', '/')}"]
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-9)


def test_what_learns_are_the_parameters_of_the_model_that_was_given(device):
    model = copy.deepcopy(stock("deepseek_v3", device, 1))
    model.lm_head.weight.requires_grad_(False)
    _, learning = joint(model, **OPTIONS)
    given = dict(model.named_parameters())
    assert given.keys() - learning.keys() == {"lm_head.weight"}
    assert all(p.data_ptr() == given[name].data_ptr() for name, p in learning.items())


def test_no_next_token_is_learned_across_documents_or_from_padding(device):
    model, ids = float64_copy(stock("deepseek_v3", device, 1)), token_ids(2, LENGTH, device)
    student, _ = joint(model, **OPTIONS)
    alone, holes = student(ids), torch.ones(2, 3, dtype=torch.int64, device=device)
    padded = student(torch.cat([holes, ids], 1), attention_mask=torch.cat([0 * holes, torch.ones_like(ids)], 1))
    positions = torch.arange(LENGTH, device=device).repeat(2)[None]
    packed = student(ids.view(1, -1), position_ids=positions)
    for outputs in (padded, packed):
        torch.testing.assert_close(outputs["next_token"], alone["next_token"])


@pytest.mark.parametrize(
    ("dtype", "sparse", "words"),
    [(torch.float32, False, "expected the second stage"), (torch.bfloat16, True, "float32.* came torch.bfloat16")],
)
def test_a_model_that_would_not_learn_is_refused(dtype, sparse, words, device):
    model = copy.deepcopy(stock("deepseek_v3", device, 1)).to(dtype)
    with pytest.raises(ConfigError, match=f"train_all: .*{words}"):
        Student(model, DSAConfig(**OPTIONS), seed=1, sparse=sparse, train_all=True)


def test_a_row_that_is_padded_and_packed_is_refused(device):
    inputs = left_padded(2, LENGTH, device)
    with pytest.raises(InputError, match=r"either padded .* or packed"):
        student_of(stock("deepseek_v3", device))(token_ids(2, LENGTH, device), **inputs)


@pytest.mark.parametrize("fields", [{"selector": "dense", "indexer": None}, {"disable_passes": ["plan_selection"]}])
def test_what_has_no_indexer_to_train_is_refused(fields, device):
    with pytest.raises(ConfigError, match="an indexer is trained with every pass and for selector='indexer'"):
        student_of(stock("deepseek_v3", device), **fields)
