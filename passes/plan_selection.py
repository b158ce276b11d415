"""Let layers attend to each other's selections, and drop what nobody attends to.

Before, with the plan own, own, from:1::

    topk_0 = dsa.select(...);  out_0 = dsa.mla(..., topk_0, ...)
    topk_1 = dsa.select(...);  out_1 = dsa.mla(..., topk_1, ...)
    dsa.cache_write(latent_2, index_keys_2, slots, c_kv, k_pe, ik)
    topk_2 = dsa.select(...);  out_2 = dsa.mla(..., topk_2, ...)

After::

    topk_0 = dsa.select(...);  out_0 = dsa.mla(..., topk_0, ...)
    topk_1 = dsa.select(...);  out_1 = dsa.mla(..., topk_1, ...)
    dsa.cache_write(latent_2, index_keys_2, slots, c_kv, k_pe, None)
    out_2 = dsa.mla(..., topk_1, ...)

The projections of a dropped selection go with it. Without a plan the graph stays as it is. A layer that the graph runs
several times, as the MTP layer, may attend to what it selected first, of whose last row there are fewer later.

Where layer 0 attends to the selection of the token before, with ``layer0="previous_step"``, before::

    dsa.keep_selection(kept, slots, None, True)
    topk_0 = dsa.select(...);  out_0 = dsa.mla(..., topk_0, ...)

and after, where a call brings one token::

    topk_0 = dsa.select(...);  out_0 = dsa.mla(..., with_own_slot(kept, visible), ...)
    ...
    dsa.keep_selection(kept, slots, topk_0, True)
"""

import re
import warnings
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from dsa_compile.errors import ConfigError
from dsa_compile.lowering.keep_selection.previous import previous_rows, with_own_slot
from dsa_compile.passes.absorption import readers, whole_pool
from dsa_compile.passes.base import (
    Context,
    GraphPass,
    Refused,
    arguments,
    attention_path,
    emit,
    erase_dead,
    is_op,
    set_arguments,
    value_of,
)
from dsa_compile.plan import EVERYTHING, PREVIOUS_STEP, UNMARKED, Plan, plan_of


@dataclass(frozen=True)
class _Match:
    """``mark``: as `Plan.mark`. ``topk``: the selection that it names, None where the layer attends to everything."""

    mla: Node
    mark: int
    topk: Node | None


class PlanSelection(GraphPass):
    """Rewires ``topk_indices`` as `prepare` marked the layers, or by ``DSAConfig.plan`` in other models.

    Numerics: changes, unless K covers every slot.
    """

    name = "plan_selection"
    numerics = "changes"

    def __call__(self, gm: GraphModule, context: Context) -> int:
        planned = context.config.plan not in (None, "own")
        if not planned and all(arguments(n)["selection_of"] == UNMARKED for n in self.candidates(gm.graph)):
            return 0
        if planned and not _selections(gm.graph):
            warnings.warn(
                f"plan={context.config.plan!r} has no effect: no layer of the graph has a selection to share. Give the "
                "model an indexer (dsa_compile.optimize or prepare), or selector='attention'.",
                stacklevel=2,
            )
        done = super().__call__(gm, context)
        dropped = [n for n in _selections(gm.graph) if not n.users]
        for node in dropped:
            where, label = self.where(node), str(node)
            _drop(gm.graph, node)
            context.report.matched(self.name, where, "selection dropped: no layer attends to it", label)
        gm.recompile()
        return done + len(dropped)

    def candidates(self, graph: Graph) -> list[Node]:
        return graph.find_nodes(op="call_function", target=torch.ops.dsa.mla.default)

    def match(self, node: Node, context: Context) -> _Match:
        args = arguments(node)
        mark, topk = args["selection_of"], args["topk_indices"]
        if mark == UNMARKED:
            if context.config.plan in (None, "own"):
                raise Refused("attends to the selection that the model gives it", node)
            mark = _plan(node.graph, context).mark(_layer(node))
        if mark == EVERYTHING:
            if topk is None:
                raise Refused("attends to everything already", node)
            return _Match(node, mark, None)
        source = _layer(node) if mark == PREVIOUS_STEP else mark
        wanted = next((n for n in _selections(node.graph) if _layer(n) == source), None)
        if wanted is None:
            raise Refused(f"layer {source} has no selection to attend to", node)
        if mark == PREVIOUS_STEP:
            if topk is not wanted:
                raise Refused("attends to the selection of the token before already", node)
            if args["visible"] is None:
                raise Refused("which token a row is, a mask does not say: its own selection stays", node)
        elif topk is not None and wanted in (topk, *topk.all_input_nodes):
            raise Refused(f"attends to the selection of layer {source} already", node)
        return _Match(node, mark, wanted)

    def rewrite(self, graph: Graph, match: _Match, context: Context) -> str:
        topk = match.topk
        if topk is not None and match.mark == PREVIOUS_STEP:
            return _attend_a_token_late(graph, match.mla, topk)
        if topk is not None and (rows := value_of(arguments(match.mla)["q"]).shape[2]) != value_of(topk).shape[1]:
            topk = emit(graph, match.mla, lambda picks: picks[:, -rows:], topk)
        set_arguments(match.mla, topk_indices=topk)
        return "attends to everything" if match.topk is None else f"attends to the selection of layer {match.mark}"


def _selections(graph: Graph) -> list[Node]:
    ops = torch.ops.dsa.select.default, torch.ops.dsa.select_attention.default
    return [n for op in ops for n in graph.find_nodes(op="call_function", target=op)]


def _layer(node: Node) -> int:
    found = re.search(r"layers\.(\d+)", attention_path(node))
    if found is None:
        raise Refused("no number of a layer in its module path", node)
    return int(found[1])


def _plan(graph: Graph, context: Context) -> Plan:
    """The plan of all layers of the graph; a graph knows no config of a model."""
    wanted = context.config.plan
    if isinstance(wanted, str) and "model" in wanted.split("+"):
        raise ConfigError("plan='model' reads the model's config: use dsa_compile.optimize or prepare with it.")
    mlas = graph.find_nodes(op="call_function", target=torch.ops.dsa.mla.default)
    layers, selecting = [_layer(n) for n in mlas], {_layer(n) for n in _selections(graph)}
    if layers != list(range(len(layers))):
        raise Refused(f"a plan is for all layers from 0 on, the graph holds {layers}", mlas[0])
    with_indexer = [layer in selecting for layer in layers]
    if not any(with_indexer):
        raise Refused("no layer has a selection", mlas[0])
    return plan_of(wanted, with_indexer, layer0=context.config.layer0)


def _attend_a_token_late(graph: Graph, mla: Node, topk: Node) -> str:
    """Let ``mla`` attend to what ``topk`` is for the token before, and keep ``topk`` for the next one."""
    keepers = graph.find_nodes(op="call_function", target=torch.ops.dsa.keep_selection.default)
    keeper = next((n for n in keepers if _layer(n) == _layer(mla)), None)
    kept = arguments(keeper)["kept"] if keeper is not None and arguments(keeper)["current"] else None
    visible = arguments(mla)["visible"]
    if kept is not None and value_of(topk).shape[1] == 1:
        late = emit(graph, mla, lambda kept, visible: with_own_slot(kept.unsqueeze(1), visible), kept, visible)
    else:
        late = emit(graph, mla, previous_rows, topk, kept, visible)
    set_arguments(mla, topk_indices=late)
    if keeper is not None:
        set_arguments(keeper, topk_indices=topk)
        graph.find_nodes(op="output")[0].prepend(keeper)  # at the end, so that what is selected has until then
    known = "the first row to its own" if kept is None else "the first row to the one that the cache kept"
    return f"attends to its own selection of the token before, {known}"


def _drop(graph: Graph, topk: Node) -> None:
    """Erase a selection, what only it read, and the write of index keys that nobody reads any more."""
    keys = arguments(topk).get("index_keys")
    keys = None if keys is None else whole_pool(keys)
    erase_dead(graph, topk)
    if keys is None or keys._erased or any(is_op(u, "select") for u in readers(keys)):
        return
    for write in [u for u in keys.users if is_op(u, "cache_write")]:
        args = arguments(write)
        if args["c_kv"] is None:
            graph.erase_node(write)
        else:
            set_arguments(write, index_key=None)
        erase_dead(graph, args["index_key"])
