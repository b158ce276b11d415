"""The one host-side step around a prepared model's forward, never traced.

It refuses what the compiled graph would serve wrongly, turns the 2-D mask into slots and visible ranges, and counts
tokens only when the call went through.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from dsa_compile import compat
from dsa_compile.cache import DSACache, slots_and_visible
from dsa_compile.compiled import Compiled
from dsa_compile.cost.workspace import pieces
from dsa_compile.decode import decode
from dsa_compile.errors import CacheError, InputError
from dsa_compile.generate import sample
from dsa_compile.pace import Pace

PARAMETERS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "inputs_embeds",
    "labels",
    "use_cache",
    "logits_to_keep",
)
"""Positional parameters of the forward of every family's causal language model."""

SPARE_TOKENS = 256
"""Room that a cache made by a plain call leaves for the calls after it."""


def _forward(model: Any, inputs: dict[str, Any]) -> Any:
    return model._call_impl(**inputs)


class Guard:
    """What ``model(...)`` runs: checks, the (compiled) forward, and the cache's accounts."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.compiled = Compiled(model)
        self._run: Callable[..., Any] = _forward
        self._said: set[str] = set()
        self._paces: dict[int, Pace] = {}  # by batch size

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """From now on run forward and drafting through ``torch.compile(..., *args, **kwargs)``, as one graph each."""
        compat.raise_recompile_limit()
        self.compiled = Compiled(self.model, (args, {"fullgraph": True, **kwargs}))
        self._run = self.compiled.function(_forward)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "compile": self.compiled.arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]
        if state["compile"] is not None:
            args, kwargs = state["compile"]
            self.compile(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = dict(zip(PARAMETERS, args)) | kwargs
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if tokens is None:
            return self.model._call_impl(**inputs)  # raises what the stock model raises
        if torch.compiler.is_compiling():
            return self._traced(tokens, inputs)
        self._check(tokens, inputs)
        if self._shows_states(inputs):
            maybe_install_capturing_hooks(self.model.model)  # takes a lock, which no graph can hold
        cache = self._cache(tokens, inputs)
        if cache is None:
            inputs["attention_mask"] = visible_without_cache(
                tokens, inputs.get("attention_mask"), inputs.get("position_ids")
            )
            inputs["position_ids"] = _positions(tokens, inputs.get("position_ids"), 0)
            return self._run(self.model, _hinted(inputs | {"use_cache": False}, tokens))
        return self._cached(tokens, inputs, cache)

    def sample(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``generate`` calls for greedy search and sampling; ``plain`` is transformers' own loop."""
        cache = kwargs.get("past_key_values")
        try:
            output = self._sampled(plain, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise  # its memory is wanted
        except BaseException:
            self.compiled.lender.give_back(cache)  # a traceback, which may be kept, holds it as well
            raise
        if isinstance(output, Tensor):  # it hands the cache to nobody
            self.compiled.lender.give_back(cache)
        return output

    def _sampled(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.model.dsa.drafts:
            pace = None
            if self.model.dsa.config.mtp.drafts == "auto":
                pace = self._paces.setdefault(args[0].shape[0], Pace(self.model.dsa.drafts))
            drafter = self.compiled.drafter if self.compiled.replays else None
            return sample(self.model, self.compiled.graphs, drafter, pace, self._say_once, plain, *args, **kwargs)
        if self.compiled.replays:
            return decode(self.model, self.compiled.decoder, plain, *args, **kwargs)
        return plain(*args, **kwargs)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=4)

    def _traced(self, tokens: Tensor, inputs: dict[str, Any]) -> Any:
        """Inside somebody's ``torch.compile(model)``: only what is arithmetic, and no cache."""
        if inputs.get("past_key_values") is not None or inputs.get("use_cache"):
            raise CacheError("torch.compile around a prepared model has no cache; use dsa_compile.optimize(model).")
        inputs["attention_mask"] = visible_without_cache(
            tokens, inputs.get("attention_mask"), inputs.get("position_ids")
        )
        return self.model._call_impl(**(inputs | {"use_cache": False}))

    def _cached(self, tokens: Tensor, inputs: dict[str, Any], cache: DSACache) -> Any:
        valid = self._valid(tokens, inputs.get("attention_mask"), cache)
        cache.check_room(valid)  # of the whole call, before a piece of it is written
        positions = _positions(tokens, inputs.get("position_ids"), cache.lengths.padded)
        before = dict(vars(cache.lengths))
        try:
            for columns in self._pieces(tokens, inputs):
                piece = _columns(inputs | {"position_ids": positions}, columns)
                output = self._append(tokens[:, columns], piece, valid[:, columns], cache)
        except BaseException:
            # the cache may have kept selections of tokens that do not count
            vars(cache.lengths).update(before, slots=None, current=False)
            raise
        cache.fingerprint = cache.fingerprint or self.model.dsa.fingerprint
        return output

    def _append(self, tokens: Tensor, inputs: dict[str, Any], valid: Tensor, cache: DSACache) -> Any:
        """One forward, whose tokens are counted behind those of the cache."""
        slots, visible = cache.plan(valid)
        inputs |= {"attention_mask": visible, "past_key_values": cache, "use_cache": True}
        cache.lengths.slots = slots
        if slots.shape[1] > 1:
            compat.hint_dynamic(slots, 1)
            cache.lengths.reach = slots.new_empty(cache.reach(slots.shape[1]), 0)
            compat.hint_dynamic(cache.lengths.reach, 0)
        with torch.no_grad():  # a cache is for inference: its writes have no gradient
            output = self._run(self.model, _hinted(inputs, tokens))
        cache.lengths.slots = cache.lengths.reach = None
        cache.commit(valid)
        cache.lengths.current &= self.compiled.arguments is not None  # without a backend nobody keeps selections
        return output

    def _pieces(self, tokens: Tensor, inputs: dict[str, Any]) -> list[slice]:
        """Columns that run one after another, so that ``prefill_budget`` holds what a layer makes of them.

        A call that returns something of every token, or more logits than a piece has, holds as much anyway, and runs
        as it is.
        """
        T, kept = tokens.shape[1], inputs.get("logits_to_keep", 0)
        if not isinstance(kept, int) or kept < 1 or inputs.get("labels") is not None or self._shows_states(inputs):
            return [slice(0, T)]
        most = self.model.dsa.config.prefill_budget // (self.model.workspace_bytes() * tokens.shape[0])
        parts = pieces(T, most)
        return parts if kept <= parts[-1].stop - parts[-1].start else [slice(0, T)]

    def _shows_states(self, inputs: dict[str, Any]) -> bool:
        return bool(inputs.get("output_hidden_states") or self.model.config.output_hidden_states)

    def _check(self, tokens: Tensor, inputs: dict[str, Any]) -> None:
        model = self.model
        if inputs.get("output_attentions") or model.config.output_attentions:
            raise InputError(
                "output_attentions=True: an optimized model never holds attention probabilities. Use the stock model, "
                "or leave output_attentions out."
            )
        if model.training and model.config.attention_dropout > 0:
            raise InputError(
                f"attention_dropout={model.config.attention_dropout} in training mode: dsa attention has no dropout. "
                "Set model.config.attention_dropout = 0 before optimizing, or call model.eval()."
            )
        if tokens.device != model.device:
            raise InputError(f"input tokens are on {tokens.device}, the model is on {model.device}; move them there.")
        embeds = inputs.get("inputs_embeds")
        if embeds is not None and embeds.dtype != model.dtype:
            raise InputError(f"inputs_embeds: expected {model.dtype} as the model's, came {embeds.dtype}.")
        mask = inputs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            came = f"{mask.dim()} dimensions" if isinstance(mask, Tensor) else type(mask).__name__
            raise InputError(
                f"attention_mask: expected a 2-D mask [batch, tokens] of 1 (token) and 0 (padding), came {came}. "
                "Masks of another form have no place in a compact cache; use the stock model for them."
            )
        positions = inputs.get("position_ids")
        if positions is not None and (
            positions.dim() != 2
            or positions.shape[0] not in (1, tokens.shape[0])
            or positions.shape[1] != tokens.shape[1]
        ):
            raise InputError(
                f"position_ids: expected [{tokens.shape[0]} or 1, {tokens.shape[1]}], came {tuple(positions.shape)}."
            )

    def _cache(self, tokens: Tensor, inputs: dict[str, Any]) -> DSACache | None:
        """The cache of this call: the given one, checked; a new one where the stock model would make one; or none."""
        cache, model = inputs.get("past_key_values"), self.model
        if cache is None:
            wanted = inputs.get("use_cache")
            if wanted is None:
                wanted = model.config.use_cache and inputs.get("labels") is None and not torch.is_grad_enabled()
            return model.cache_for(tokens.shape[0], tokens.shape[1] + SPARE_TOKENS) if wanted else None
        if not isinstance(cache, DSACache):
            raise CacheError(
                f"past_key_values: expected a DSACache, came {type(cache).__name__}. Make one with model.make_cache(), "
                "or leave it out."
            )
        if cache.dims != model.dsa.dims or cache.fingerprint not in (None, model.dsa.fingerprint):
            raise CacheError(
                "past_key_values: this cache belongs to another model, or to this one under another plan, indexer or "
                "rotate_index; its rows mean nothing here. Make one with model.make_cache()."
            )
        if cache.batch_size != tokens.shape[0]:
            raise CacheError(f"past_key_values holds {cache.batch_size} sequences, the call has {tokens.shape[0]}.")
        if (cache.dtype, cache.device) != (model.dtype, model.device):
            raise CacheError(
                f"past_key_values is {cache.dtype} on {cache.device}, the model is {model.dtype} on {model.device}."
            )
        return cache

    def _valid(self, tokens: Tensor, mask: Tensor | None, cache: DSACache) -> Tensor:
        """bool[B, T]: which of the new tokens are no padding."""
        B, T = tokens.shape[:2]
        if mask is None:
            return torch.ones(B, T, dtype=torch.bool, device=tokens.device)
        padded = cache.lengths.padded
        mask = mask.to(tokens.device) != 0
        if mask.shape != (B, padded + T):
            raise InputError(
                f"attention_mask: expected [{B}, {padded + T}] ({padded} tokens in the cache and {T} new ones), "
                f"came {tuple(mask.shape)}."
            )
        if not torch.equal(mask[:, :padded], cache.lengths.seen):
            raise InputError(
                "attention_mask: its first columns differ from the mask under which the cached tokens were written; a "
                "cached token cannot be masked later, nor padding become a token. Start with a new cache."
            )
        return mask[:, padded:]


def visible_without_cache(tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """visible int32[B, 1, T, 2] of a call that keeps nothing.

    Without a mask, a jump in ``positions`` starts a new packed document, as transformers reads it.
    """
    B, T = tokens.shape[:2]
    if mask is not None:
        if mask.shape != (B, T):
            raise InputError(f"attention_mask: expected [{B}, {T}] as there is no cache, came {tuple(mask.shape)}.")
        return slots_and_visible(mask.to(tokens.device) != 0, None)[1]
    steps = torch.arange(T, dtype=torch.int32, device=tokens.device).expand(B, T)
    start = torch.zeros_like(steps)
    if positions is not None:
        new = torch.diff(positions, dim=-1, prepend=positions[:, :1] - 1) != 1
        start = torch.where(new, steps, 0).cummax(-1).values.to(torch.int32)
    return torch.stack([start, steps + 1], -1).unsqueeze(1)


def _columns(inputs: dict[str, Any], columns: slice) -> dict[str, Any]:
    """The inputs of these tokens alone."""
    names = [n for n in ("input_ids", "inputs_embeds", "position_ids") if inputs.get(n) is not None]
    return inputs | {name: inputs[name][:, columns].contiguous() for name in names}


def _positions(tokens: Tensor, positions: Tensor | None, past: int) -> Tensor:
    """[B, T], whatever form they came in: one form, one graph."""
    if positions is None:
        positions = torch.arange(past, past + tokens.shape[1], device=tokens.device).unsqueeze(0)
    return positions.expand(tokens.shape[:2]).contiguous()


def _hinted(inputs: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """Mark the token dimension dynamic, so that prompts of all lengths share a graph."""
    if tokens.shape[1] > 1:
        for name in ("input_ids", "inputs_embeds", "position_ids", "labels"):
            if inputs.get(name) is not None:
                compat.hint_dynamic(inputs[name], 1)
        compat.hint_dynamic(inputs["attention_mask"], 2)
    return inputs
