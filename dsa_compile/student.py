"""A frozen model that attends densely, and indexers that learn from it."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dsa_compile.config import DSAConfig
from dsa_compile.divergence import taught_attention
from dsa_compile.errors import ConfigError, InputError
from dsa_compile.models.family import attention_modules
from dsa_compile.models.indexer import LightningIndexer, randomize
from dsa_compile.models.mtp import attend_without_cache
from dsa_compile.passes.base import arguments, erase_dead
from dsa_compile.plan import Plan
from dsa_compile.replanning import plan_on, planned_copy, prepared_twin


class Student(nn.Module):
    """What is trained: the indexers that a plan reads, in float32 at least, each for the layers that attend with it.

    The target of an indexer is the mean attention of its layers. Its divergences from each of them, averaged, have the
    gradient of that from their mean, as both are linear in the target but for a constant (IndexCache, arXiv
    2603.12201); so no target is kept from a layer to the next. The model is no submodule: what moves, saves or shards
    a student sees indexers alone.

    Attributes:
        model: the prepared copy, frozen, on the weights of the model that was given.
        plan: which layers attend with which indexer. sources: the same with the MTP layer, if ``options`` attach one,
            behind the last; it always attends with its own. taught: the layers that attend with one.
        indexers: by number of layer.
    """

    model: Any

    def __init__(self, model: nn.Module, options: DSAConfig, seed: int, *, sparse: bool = False) -> None:
        """Indexers that start as ``options.indexer`` says, ``"random"`` (of ``seed``) or trained.

        ``sparse``: layers attend to what the indexers select as they learn, and teach them about that alone.
        """
        super().__init__()
        self.sparse = sparse
        if options.selector not in (None, "indexer") or options.disable_passes:
            raise ConfigError(
                "an indexer is trained with every pass and for selector='indexer': leave the others out, came "
                f"{options.selector!r} and {options.disable_passes}."
            )
        twin = prepared_twin(model, options)
        precise = torch.promote_types(twin.dtype, torch.float32)
        self.plan: Plan = plan_on(twin, options.plan, options.layer0)
        mtp = (len(self.plan.sources),) if twin.dsa.drafts else ()
        self.sources: tuple[int | None, ...] = (*self.plan.sources, *mtp)
        self.taught = tuple(i for i, source in enumerate(self.sources) if source is not None)
        generator = torch.Generator().manual_seed(seed)
        self.indexers = nn.ModuleDict()
        for attention in attention_modules(twin):
            indexer: Any = getattr(attention, "indexer", None)
            if indexer is not None and attention.layer_idx in self.sources:
                self.indexers[str(attention.layer_idx)] = indexer.to(precise).requires_grad_(True)
                if isinstance(indexer, LightningIndexer) and options.indexer == "random":
                    randomize(indexer, generator)
        if not self.indexers:
            raise ConfigError(f"plan={options.plan!r}: no layer attends with an indexer, so there is none to train.")
        if mtp:
            twin.model.register_forward_hook(attend_without_cache, with_kwargs=True)
        twin.compile(backend=self._capture)
        self.__dict__["model"] = twin
        self._losses: tuple[Tensor, ...] = ()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Losses of a batch int64[B, T].

        Args:
            attention_mask: [B, T], 0 for padding. position_ids: [B, T]; where they jump, another document begins, and
                what is before it is not seen.

        Returns:
            ``loss``, the mean over indexers and, of each, over its layers; ``layers``, [len(taught)], of each layer
            that attends: nats per token that sees something.

        Raises:
            InputError: both a mask with padding and positions are given.
        """
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        if attention_mask is not None and position_ids is not None:
            raise InputError(
                "a batch with padding and position_ids: expected rows that are either padded (attention_mask alone) or "
                "packed (position_ids that begin anew, attention_mask of ones or none). Leave one out."
            )
        self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, logits_to_keep=1
        )
        layers = torch.stack(self._losses)
        share = layers.new_tensor([1 / self.sources.count(self.sources[i]) for i in self.taught])
        return {"loss": (layers * share).sum() / len(self.indexers), "layers": layers.detach()}

    def weights(self) -> dict[str, Tensor]:
        """Tensors under DeepSeek-V3.2's names, in the dtypes that the model runs them in."""
        dtype = self.model.dtype
        precise = torch.promote_types(dtype, torch.float32)
        return {
            f"model.layers.{layer}.self_attn.indexer.{name}": t.detach().to(
                precise if "weights_proj" in name else dtype
            )
            for layer, indexer in self.indexers.items()
            for name, t in indexer.named_parameters()
        }

    def _capture(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        taught = planned_copy(gm, self.model, self.plan)
        _teach(taught, self.sparse)

        def run(*inputs: Any) -> list[Any]:
            *outputs, self._losses = taught(*inputs)
            return outputs

        return run


def _teach(gm: GraphModule, sparse: bool) -> None:
    """Give the graph the divergence of each layer that has a selection; if not ``sparse``, that attends to all then."""
    losses: list[Node] = []
    (output,) = gm.graph.find_nodes(op="output")
    for mla in gm.graph.find_nodes(op="call_function", target=torch.ops.dsa.mla.default):
        args = arguments(mla)
        if args["topk_indices"] is None:
            continue
        topk = args["topk_indices"]
        index = arguments(topk)
        read = [args[name] for name in ("q", "c_kv", "k_pe", "kv_b_weight", "visible")]
        student = [index[name] for name in ("q", "weights", "index_keys")]
        with gm.graph.inserting_before(mla):
            both = gm.graph.call_function(
                taught_attention,
                (*read, topk if sparse else None, *student, args["nope"], args["scale"], index["scale"]),
            )
            attended, loss = (gm.graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        mla.replace_all_uses_with(attended)
        gm.graph.erase_node(mla)
        erase_dead(gm.graph, topk)
        losses.append(loss)
    output.args = ((*output.args[0], tuple(losses)),)
    gm.graph.lint()
    gm.recompile()
