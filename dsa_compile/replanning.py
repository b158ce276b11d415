"""One capture of a model, run under one plan after another."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from dsa_compile.api import prepare
from dsa_compile.config import DSAConfig
from dsa_compile.errors import ConfigError
from dsa_compile.passes.base import arguments
from dsa_compile.passes.pipeline import rewrite
from dsa_compile.plan import Plan, plan_of
from dsa_compile.selection_figures import selection_figures


class Replanned:
    """A copy of a model, on the same weights, that is captured once: another plan only rewires its graph.

    Attributes:
        model: the prepared copy; the one that was given stays as it is.
        own: the plan that the model has.
    """

    def __init__(self, model: nn.Module, options: DSAConfig) -> None:
        if options.selector == "dense" or options.disable_passes:
            raise ConfigError(
                "plans are measured on a model that selects and with every pass: expected selector='indexer' or "
                f"'attention' and no disable_passes, came {options.selector!r} and {options.disable_passes}."
            )
        self.model = prepared_twin(model, DSAConfig.of(options, mtp=None))
        self.own: Plan = self.model.dsa.plan
        self._job: tuple[Plan, bool] = (self.own, False)
        self._graphs: dict[GraphModule, GraphModule] = {}
        self._figures: tuple[Tensor, ...] = ()
        self.model.compile(backend=self._capture)

    def plan(self, wanted: Any, layer0: str = "serial") -> Plan:
        """What ``wanted`` (see `plan_of`) is on this model."""
        return plan_on(self.model, wanted, layer0)

    def logits(self, ids: Tensor, plan: Plan) -> Tensor:
        """[T, vocab] of the tokens ``ids`` int64[T] under a plan."""
        return self._run(ids, (plan, False))

    def measured(self, ids: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """`logits`, and the `selection_figures` of each layer, float64[layers, 4]."""
        logits = self._run(ids, (plan, True))
        return logits, torch.stack(self._figures)

    def _run(self, ids: Tensor, job: tuple[Plan, bool]) -> Tensor:
        if job != self._job:
            self._job = job
            self._graphs.clear()
        with torch.no_grad():
            logits: Tensor = self.model(ids[None].to(self.model.device), use_cache=False).logits
        return logits[0]

    def _capture(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> list[Any]:
            if gm not in self._graphs:
                self._graphs[gm] = self._planned(gm)
            *outputs, self._figures = self._graphs[gm](*inputs)
            return outputs

        return run

    def _planned(self, gm: GraphModule) -> GraphModule:
        plan, measure = self._job
        planned = planned_copy(gm, self.model, plan)
        _append_figures(planned.graph, self.model.dsa.index_topk if measure else None)
        if self.model.device.type == "cuda":  # kernels gather what is selected, the references are faster behind a mask
            rewrite(planned, DSAConfig(lowering="eager"))
        planned.recompile()
        return planned


def on_same_weights(model: nn.Module) -> Any:
    """A copy of a model whose weights, frozen, are those of the model; only those of indexers are its own."""
    # the weights of an indexer may be replaced by those that options name
    shared = [t for name, t in model.state_dict(keep_vars=True).items() if ".indexer." not in name]
    frozen = {id(t): nn.Parameter(t, requires_grad=False) if isinstance(t, nn.Parameter) else t for t in shared}
    return copy.deepcopy(model, frozen).eval()


def prepared_twin(model: nn.Module, options: DSAConfig) -> Any:
    """A prepared copy of a model under its own plan, on the same weights; all but those of indexers are frozen."""
    twin = on_same_weights(model)
    own = None if options.plan is None else "own"  # layers that no plan reads need no indexer
    alone: dict[str, Any] = {"layer0": "serial", "evaluation": None, "lowering": "eager"}
    prepare(twin, options, plan=own, **alone)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(".indexer." in name)  # the MTP layer's are not the model's
    return twin


def plan_on(model: Any, wanted: Any, layer0: str = "serial") -> Plan:
    """What ``wanted`` (see `plan_of`) is on a prepared model that is under its own plan."""
    with_indexer = [source == layer for layer, source in enumerate(model.dsa.plan.sources)]
    return plan_of(wanted, with_indexer, layer0=layer0, model_config=model.config)


def planned_copy(gm: GraphModule, model: Any, plan: Plan) -> GraphModule:
    """A copy of a captured graph of a prepared model, in which each ``dsa::mla`` has the selection that a plan says.

    That of an MTP layer, which no plan reaches, keeps its own.
    """
    planned = GraphModule(gm, copy.deepcopy(gm.graph))
    text = (*plan.text(), "own") if model.dsa.drafts else plan.text()
    options = model.dsa.graph_options() | {"plan": text, "disable_passes": ("sparsify", "absorb_mla", "choose_form")}
    rewrite(planned, DSAConfig.of(**options))
    return planned


def _append_figures(graph: Graph, index_topk: int | None) -> None:
    """Give the graph one more output: the `selection_figures` of each layer, none where ``index_topk`` is None."""
    figures, before = [], None
    (output,) = graph.find_nodes(op="output")
    if index_topk is not None:
        for mla in graph.find_nodes(op="call_function", target=torch.ops.dsa.mla.default):
            args = arguments(mla)
            read = [args[name] for name in ("q", "c_kv", "k_pe", "kv_b_weight", "visible", "topk_indices")]
            with graph.inserting_before(mla):
                node = graph.call_function(selection_figures, (*read, before, args["nope"], args["scale"], index_topk))
            figures.append(node)
            before = args["topk_indices"]
    output.args = ((*output.args[0], tuple(figures)),)
