"""`explain`: what the passes would do to a model, and what that costs, without touching it."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from torch import nn
from torch.fx import GraphModule

from dsa_compile import cost
from dsa_compile.api import prepare
from dsa_compile.config import DSAConfig
from dsa_compile.dims import LayerDims
from dsa_compile.errors import InputError
from dsa_compile.models.family import attention_modules, family_named, family_of
from dsa_compile.models.prepared import PreparedModel, Recorded
from dsa_compile.passes.pipeline import PIPELINE, rewrite
from dsa_compile.report import Entry, Report

DEFAULT_TOKENS = 64
DEFAULT_CONTEXT = 32768


@dataclass(frozen=True)
class LayerExplanation:
    """One attention layer: what the passes did, or why not, in prefill and decode.

    ``dense`` and ``chosen`` are costs of one decode step; ``chosen`` is sparse where `sparsify` matched, else dense.
    """

    path: str
    indexer: str
    prefill: list[Entry]
    decode: list[Entry]
    bytes_per_token: int
    stock_bytes_per_token: int
    dense: cost.Cost
    chosen: cost.Cost


@dataclass(frozen=True)
class Explanation:
    """A dry run of the passes. ``str()`` of it, or rich's ``print``, shows tables.

    ``plan``: a letter a layer, see `dsa_compile.plan.Plan.letters`. ``recordings``: the CUDA graphs by which a prepared
    model decodes, of which there are some once it has generated on a GPU.
    """

    model: str
    selector: str
    index_topk: int
    plan: str
    context: int
    layers: list[LayerExplanation]
    reports: dict[str, Report] = field(repr=False)
    recordings: tuple[Recorded, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def stock_bytes_per_token(self) -> int:
        """The same in the stock model with transformers' own cache."""
        return sum(layer.stock_bytes_per_token for layer in self.layers)

    @property
    def dense(self) -> cost.Cost:
        """One decode step with dense attention over latents, all layers."""
        return _total(layer.dense for layer in self.layers)

    @property
    def chosen(self) -> cost.Cost:
        """One decode step as the passes made it, all layers."""
        return _total(layer.chosen for layer in self.layers)

    def __str__(self) -> str:
        console = Console(width=140, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __rich__(self) -> Group:
        tables = [self._layer_table(), self._pass_table(), self._op_table()]
        return Group(*tables, *([self._recording_table()] if self.recordings else []))

    def _layer_table(self) -> Table:
        what = "dense" if self.selector == "dense" else f"{self.selector}, K = {self.index_topk}, plan {self.plan}"
        table = Table(title=f"{self.model}: selector {what}, decode costs at {self.context:,} tokens")
        for name in ("layer", "indexer", "prefill", "decode"):
            table.add_column(name)
        for name in ("B/token", "stock B/token", "MFLOP dense", "MFLOP here", "MiB dense", "MiB here"):
            table.add_column(name, justify="right")
        for layer in self.layers:
            table.add_row(
                layer.path.removeprefix("model.").removesuffix(".self_attn"),
                layer.indexer,
                _outcome(layer.prefill),
                _outcome(layer.decode),
                f"{layer.bytes_per_token:,}",
                f"{layer.stock_bytes_per_token:,}",
                *_figures(layer.dense, layer.chosen),
            )
        table.add_section()
        totals = _figures(self.dense, self.chosen)
        table.add_row("all", "", "", "", f"{self.bytes_per_token:,}", f"{self.stock_bytes_per_token:,}", *totals)
        return table

    def _pass_table(self) -> Table:
        table = Table(title="what each pass did at the attention layers")
        for name in ("pass", "step", "result", "layers"):
            table.add_column(name)
        for graph_pass in PIPELINE:
            for step, report in self.reports.items():
                for result, count in Counter(map(_result, report.of(graph_pass.name))).items():
                    table.add_row(graph_pass.name, step, result, str(count))
        return table

    def _op_table(self) -> Table:
        table = Table(title="operators that each pass adds and removes")
        table.add_column("pass")
        for name in self.reports:
            table.add_column(name)
        for graph_pass in PIPELINE:
            changes = [report.op_changes(graph_pass.name) for report in self.reports.values()]
            table.add_row(graph_pass.name, *(", ".join(f"{op} {n:+d}" for op, n in c.items()) or "-" for c in changes))
        return table

    def _recording_table(self) -> Table:
        table = Table(title="decode steps recorded in CUDA graphs")
        for name in ("batch", "slots", "MiB"):
            table.add_column(name, justify="right")
        table.add_column("tokens")
        for r in self.recordings:
            sampling = "greedy" if r.sampling.greedy else "sampled"
            table.add_row(str(r.batch_size), f"{r.capacity:,}", f"{r.bytes / 2**20:,.1f}", sampling)
        return table


def explain(
    model: nn.Module,
    inputs: Mapping[str, Any] | None = None,
    config: DSAConfig | None = None,
    *,
    context: int = DEFAULT_CONTEXT,
    **fields: Any,
) -> Explanation:
    """What `optimize` would do to a model: per layer what matched and what was skipped why, bytes and FLOPs.

    A copy without weights is prepared and captured; nothing of ``model`` changes and no attention is computed.

    Args:
        model: a stock model of a supported family, or a prepared one (then its own options are explained).
        inputs: of the prefill, for their shape; None: one sequence of 64 tokens.
        config: options as for `optimize`; ``fields`` replace single ones.
        context: tokens in the cache for which costs and the static choice between dense and sparse are shown.

    Raises:
        UnsupportedModelError, ConfigError, IndexerWeightsError, CheckpointError: as `optimize` would.
        InputError: ``inputs`` holds no input_ids.
    """
    if isinstance(model, PreparedModel):
        if config is not None or fields:
            raise InputError("explain: a prepared model is explained as it is; give no options.")
        family, options = family_named(model.dsa.family_type), _options_of(model)
    else:
        family, options = family_of(model), DSAConfig.of(config, **fields)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plan=")  # a dry run loses no quality
        clone = prepare(_weightless(model, family.causal_lm), options, evaluation=None)
    batch, tokens = _shape(inputs)
    reports = {
        "prefill": _capture(clone, batch, tokens, context),
        "decode": _capture(clone, batch, 1, context),
    }
    itemsize = getattr(model, "dtype").itemsize  # noqa: B009 (nn.Module types it as Tensor | Module)
    return Explanation(
        model=type(model).__name__,
        selector=clone.dsa.selector,
        index_topk=clone.dsa.index_topk,
        plan=clone.dsa.plan.letters,
        context=context,
        layers=_layers(clone, reports, context, itemsize, family.native_indexer),
        reports=reports,
        recordings=model.recordings() if isinstance(model, PreparedModel) else (),
    )


def _layers(
    clone: Any, reports: dict[str, Report], context: int, itemsize: int, native: bool
) -> list[LayerExplanation]:
    names = {id(module): name for name, module in clone.named_modules()}
    layers: list[LayerExplanation] = []
    held_by_layer = clone.make_cache(1, 1).layers
    letters = clone.dsa.plan.letters + ("F" if clone.dsa.drafts else "")  # the MTP layer selects for itself
    for module, dims, held, letter in zip(attention_modules(clone), clone.dsa.dims, held_by_layer, letters):
        path = names[id(module)]
        found = {kind: [e for e in r.entries if e.where == path] for kind, r in reports.items()}
        topk = clone.dsa.index_topk if _is_sparse(found["decode"]) else None
        owner = len(layers) in clone.dsa.plan.owners or len(layers) == len(clone.dsa.plan.letters)
        if letter == "D" and owner and dims.indexer:
            topk = context  # scores for others, and attends to everything
        row = held.latent.nbytes
        layers.append(
            LayerExplanation(
                path=path,
                indexer=_owner(clone, dims, letter),
                prefill=found["prefill"],
                decode=found["decode"],
                bytes_per_token=held.bytes_per_token(),
                stock_bytes_per_token=_stock_values(clone, dims, native, module) * itemsize,
                dense=cost.decode_cost(dims, context, itemsize=itemsize, row_bytes=row),
                chosen=cost.decode_cost(
                    dims,
                    context,
                    topk,
                    exact=clone.dsa.selector == "attention" and owner,
                    itemsize=itemsize,
                    row_bytes=row,
                    index_key_bytes=held.bytes_per_token() - row,
                ),
            )
        )
    return layers


def _owner(clone: Any, dims: LayerDims, letter: str) -> str:
    if clone.dsa.selector != "indexer":
        return "none"
    if letter == "D":
        return "for others" if dims.indexer else "none"
    return {"F": "own", "L": "late"}.get(letter, "shared")


def _stock_values(clone: Any, dims: LayerDims, native: bool, module: Any) -> int:
    """Values a token takes in transformers' cache: expanded keys and values and index keys where the class has them."""
    if not native:
        return dims.latent_width
    return dims.expanded_values_per_token() + (clone.config.index_head_dim if module.indexer is not None else 0)


def _total(costs: Iterable[cost.Cost]) -> cost.Cost:
    every = list(costs)
    return cost.Cost(sum(c.flops for c in every), sum(c.bytes for c in every))


def _figures(dense: cost.Cost, chosen: cost.Cost) -> list[str]:
    flops = [f"{c.flops / 1e6:,.1f}" for c in (dense, chosen)]
    return flops + [f"{c.bytes / 2**20:,.2f}" for c in (dense, chosen)]


def _result(entry: Entry) -> str:
    return entry.reason if entry.matched else f"skipped: {entry.reason}"


def _is_sparse(entries: list[Entry]) -> bool:
    return any(e.matched and e.pass_name == "sparsify" and e.reason.startswith("dsa::sparse_mla") for e in entries)


def _outcome(entries: list[Entry]) -> str:
    """What the last pass that changed the layer made of it; else why the last one did not."""
    matched = [e for e in entries if e.matched]
    chosen = matched[-1:] or entries[-1:]
    return chosen[0].reason if chosen else "not captured"


def _weightless(model: Any, cls: type[Any]) -> Any:
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return cls(config).to(model.dtype).eval()


def _options_of(model: Any) -> DSAConfig:
    """Options that prepare a weightless copy as ``model`` was prepared."""
    dsa = model.dsa
    options = DSAConfig(
        selector=dsa.selector,
        index_topk=dsa.index_topk,
        cache=dsa.config.cache,
        mtp=dsa.config.mtp,
        plan=dsa.config.plan,
        layer0=dsa.config.layer0,
        prefill=dsa.config.prefill,
        disable_passes=dsa.config.disable_passes,
    )
    if dsa.selector != "indexer" or family_named(dsa.family_type).native_indexer:
        return options
    indexer: Any = attention_modules(model)[0].indexer
    return DSAConfig.of(options, indexer="random", index_n_heads=indexer.n_heads, index_head_dim=indexer.head_dim)


def _shape(inputs: Mapping[str, Any] | None) -> tuple[int, int]:
    if inputs is None:
        return 1, DEFAULT_TOKENS
    if "input_ids" not in inputs:
        raise InputError(f"explain: expected inputs with input_ids, came {sorted(inputs)}.")
    batch, tokens = inputs["input_ids"].shape
    return batch, tokens


class _Captured(Exception):
    """Ends a call once its graph was captured and rewritten."""


def _capture(clone: Any, batch: int, tokens: int, context: int) -> Report:
    reports: list[Report] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        reports.append(rewrite(gm, DSAConfig.of(**clone.dsa.graph_options())))

        def stop(*args: Any) -> None:
            raise _Captured

        return stop

    clone.compile(backend=backend)
    ids = torch.ones(batch, tokens, dtype=torch.long, device="meta")
    cache = clone.make_cache(batch, max(context, tokens))
    try:
        with torch.no_grad():
            clone(ids, past_key_values=cache, logits_to_keep=1)
    except _Captured:
        return reports[-1]
    raise InputError("explain: the model ran without a captured graph; is torch.compile disabled in this process?")
