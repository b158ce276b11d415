"""Layers of a deep model that do the same are compiled once, and give what the whole graph gives."""

import pytest
import torch
from cases import token_ids
from torch import nn

import dsa_compile
from dsa_compile import compat
from dsa_compile.backend import of_few_rows
from dsa_compile.bodies import FEW, bodies, compile_bodies, layer_of
from dsa_compile.models.miniature import miniature

LAYERS, DENSE, PROMPT = 10, 7, 9


@pytest.fixture
def compiled(monkeypatch):
    """Every graph that Inductor would compile; it runs as it is."""
    seen = []

    def compile_fx(gm, inputs, patches):
        seen.append(gm)
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    return seen


def deep(device, dense=DENSE):
    return miniature("deepseek_v32", num_hidden_layers=LAYERS, first_k_dense_replace=dense).to(device)


def prompt_and_step(model, device):
    cache = model.make_cache(2, 32)
    with torch.no_grad():
        prompt = model(token_ids(2, PROMPT, device), past_key_values=cache).logits
        step = model(token_ids(2, 1, device, seed=1), past_key_values=cache).logits
    return prompt, step, cache


def test_equal_layers_are_one_body(device, compiled):
    """What embeds, a dense layer, one of experts, what makes logits; in a prompt the first of experts makes sizes."""
    *logits, cache = prompt_and_step(dsa_compile.optimize(deep(device)), device)
    assert len(compiled) == 5 + 4
    reports = dsa_compile.recent_reports()[-2:]
    assert [report.bodies for report in reports] == [5, 4]
    assert [report.notes[-1] for report in reports] == [
        f"{LAYERS + 2} bodies run, {kinds} of them compiled" for kinds in (5, 4)
    ]
    *want, whole = prompt_and_step(dsa_compile.prepare(deep(device)), device)
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)
    for layer, other in zip(cache.layers, whole.layers):
        torch.testing.assert_close(layer.pools(), other.pools(), atol=1e-5, rtol=0)


class LastRow(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, -1:]


class Ending(nn.Module):
    """Layers of which the last one gives a row of a prompt to what lies behind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([*(nn.Linear(4, 4) for _ in range(FEW)), LastRow(4, 4)])
        self.head = nn.Tanh()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_bodies_are_given_every_size_that_they_name():
    """Of a prompt's last row the strides alone hold the prompt's length."""
    given = []

    def backend(gm, inputs):
        parts = compile_bodies(gm, lambda program, values: given.append(values) or program.forward)
        return parts.module.forward

    x = torch.randn(1, PROMPT, 4)
    compat.hint_dynamic(x, 1)
    model = Ending()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (row,) = (value for value in given[-1] if isinstance(value, torch.Tensor))
    assert row.shape == (1, 1, 4)
    assert compat.unbound_symbols([row])
    assert not any(compat.unbound_symbols(values) for values in given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:plan=")
def test_a_plan_makes_few_kinds_of_layers(device, compiled):
    model = deep(device, LAYERS)
    *logits, _ = prompt_and_step(dsa_compile.optimize(model, plan="mli+share:1/2"), device)
    kinds = [int(note.split()[3]) for report in dsa_compile.recent_reports()[-2:] for note in report.notes]
    assert len(kinds) == 2
    assert max(kinds) < LAYERS
    assert len(compiled) < 2 * LAYERS
    twin = dsa_compile.optimize(deep(device, LAYERS), plan="mli+share:1/2", lowering="eager")
    torch.testing.assert_close(logits, [*prompt_and_step(twin, device)[:2]], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_graph_with_gradients_stays_whole(device, compiled):
    dsa_compile.optimize(deep(device, LAYERS))(token_ids(1, PROMPT, device), use_cache=False)
    assert len(compiled) == 1


def chain(layers, function, value):
    """A graph of one call in each of so many layers."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = torch.zeros(2)
    for layer in range(layers):
        node = graph.call_function(function, (node,))
        node.meta["example_value"] = value
        node.meta["nn_module_stack"] = {"x": (f"L['self'].model.layers.{layer}.mlp", torch.nn.Linear)}
    graph.output(node)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_is_cut_where_layers_begin():
    found = bodies(chain(FEW + 1, torch.neg, torch.zeros(2)).graph)
    assert [layer_of(body.nodes[0]) for body in found] == [f"model.layers.{i}" for i in range(FEW + 1)]


@pytest.mark.parametrize(
    ("layers", "value", "kinds"), [(FEW, torch.zeros(2), None), (FEW + 1, torch.zeros(2), 1), (FEW + 1, (), None)]
)
def test_few_layers_and_those_that_pass_on_no_tensor_stay_whole(layers, value, kinds):
    parts = compile_bodies(chain(layers, torch.neg, value), lambda program, inputs: program.forward)
    assert (parts and parts.compiled) == kinds
    if parts is not None:
        assert torch.equal(parts.module(torch.ones(2)), torch.ones(2) * (-1) ** layers)


@pytest.mark.parametrize(("rows", "few"), [((1, 1), True), ((2, 1), True), ((1, 3), False)])
def test_a_graph_that_decodes_is_told_apart(graphs, device, rows, few):
    model = dsa_compile.optimize(miniature("deepseek_v32", num_hidden_layers=1).to(device), lowering="eager")
    with torch.no_grad():
        model(token_ids(*rows, device), past_key_values=model.make_cache(rows[0], 16))
    assert of_few_rows(graphs[0].graph) == few
