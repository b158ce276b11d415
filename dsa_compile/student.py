"""A model, frozen or learning too, and indexers that learn from its attention."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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
    """What is trained: the indexers that a plan reads, in float32 at least, and the model, if it is to learn too.

    An indexer is for the layers that attend with it; its target is their mean attention. Its divergences from each of
    them, averaged, have the gradient of that from their mean, as both are linear in the target but for a constant
    (IndexCache, arXiv 2603.12201); so no target is kept from a layer to the next. The model is no submodule: what
    moves, saves or shards a student sees alone what learns.

    Attributes:
        model: the prepared copy, on the weights of the model that was given; frozen, but for what learns.
        plan: which layers attend with which indexer. sources: the same with the MTP layer, if ``options`` attach one,
            behind the last; it always attends with its own. taught: the layers that attend with one.
        indexers: by number of layer. learning: the model's own parameters that learn, by name with / for dots.
    """

    model: Any

    def __init__(
        self,
        model: nn.Module,
        options: DSAConfig,
        seed: int,
        *,
        sparse: bool = False,
        train_all: bool = False,
        temperature: float = 1.0,
    ) -> None:
        """Indexers that start as ``options.indexer`` says, ``"random"`` (of ``seed``) or trained.

        ``sparse``: layers attend to what the indexers select as they learn, and teach them about that alone.
        ``train_all``: those of the model's parameters learn that have ``requires_grad``, where they lie.
        ``temperature``: of targets; see `taught_attention`.
        """
        super().__init__()
        self.sparse, self.train_all, self.temperature = sparse, train_all, temperature
        if train_all:
            check_learning(model, sparse)
        if not 1 <= temperature < math.inf:
            raise ConfigError(f"temperature: expected at least 1 and finite, came {temperature}.")
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
        self.learning = nn.ParameterDict()
        for name, given in model.named_parameters():
            if train_all and given.requires_grad and ".indexer." not in name:
                self.learning[name.replace(".", "/")] = twin.get_parameter(name).requires_grad_(True)
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
            that attends: nats per token that sees something. With ``train_all`` also ``next_token``, the cross-entropy
            of the model, which is part of the loss: its gradient reaches the model alone, that of the rest indexers.

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
        logits = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=0 if self.train_all else 1,
        ).logits
        layers = torch.stack(self._losses)
        share = layers.new_tensor([1 / self.sources.count(self.sources[i]) for i in self.taught])
        outputs = {"loss": (layers * share).sum() / len(self.indexers), "layers": layers.detach()}
        if self.train_all:
            next_token = _cross_entropy(logits, input_ids, attention_mask, position_ids)
            outputs |= {"loss": outputs["loss"] + next_token, "next_token": next_token.detach()}
        return outputs

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

    def write_back(self, model: nn.Module) -> None:
        """Give the model that was given what it learned, if a trainer moved the parameters that they shared."""
        with torch.no_grad():
            for name, learned in self.learning.items():
                model.get_parameter(name.replace("/", ".")).copy_(learned)

    def _capture(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        taught = planned_copy(gm, self.model, self.plan)
        _teach(taught, self.sparse, self.train_all, self.temperature)

        def run(*inputs: Any) -> list[Any]:
            *outputs, self._losses = taught(*inputs)
            return outputs

        return run


def check_learning(model: nn.Module, sparse: bool) -> None:
    """Raise ConfigError where a model cannot learn with its indexers."""
    if not sparse:
        raise ConfigError(
            "train_all: expected the second stage, in which a model learns to attend to what is selected, came dense "
            "attention. Train indexers alone first, then give sparse=True (--sparse-steps)."
        )
    coarse = sorted({str(p.dtype) for p in model.parameters() if p.requires_grad and p.itemsize < 4})
    if coarse:
        raise ConfigError(
            f"train_all: expected weights in float32, which small steps change, came {', '.join(coarse)}. Load the "
            "model with dtype=torch.float32; TrainingArguments(bf16=True) still computes in bfloat16."
        )


def _cross_entropy(
    logits: Tensor, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Tensor:
    """Of the next tokens [B, T] that are no padding and begin no document; logits [B, T, vocab]."""
    wanted = input_ids[:, 1:]
    if attention_mask is not None:
        wanted = wanted.masked_fill((attention_mask[:, :-1] & attention_mask[:, 1:]) == 0, -100)
    if position_ids is not None:
        wanted = wanted.masked_fill(position_ids[:, 1:] != position_ids[:, :-1] + 1, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted.flatten())


def _teach(gm: GraphModule, sparse: bool, train_all: bool, temperature: float) -> None:
    """Give the graph the divergence of each layer that has a selection; if not ``sparse``, that attends to all then.

    ``train_all``: attention stays what has a gradient, and divergence is beside it.
    """
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
        scales = args["scale"], index["scale"], temperature
        with gm.graph.inserting_before(mla):
            both = gm.graph.call_function(
                taught_attention, (*read, topk if sparse else None, *student, args["nope"], *scales)
            )
            attended, loss = (gm.graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        if not train_all:
            mla.replace_all_uses_with(attended)
            gm.graph.erase_node(mla)
            erase_dead(gm.graph, topk)
        losses.append(loss)
    output.args = ((*output.args[0], tuple(losses)),)
    gm.graph.lint()
    gm.recompile()
