"""What `generate`, `compile` and copying need to know of a prepared model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsa_compile.cache import DSACache
from dsa_compile.config import DSAConfig
from dsa_compile.cost.workspace import token_bytes
from dsa_compile.dims import LayerDims
from dsa_compile.errors import InputError
from dsa_compile.plan import Plan
from dsa_compile.sampling import Sampling

CAPACITY_STEP = 256
"""Caches that `generate` makes hold a multiple of this many slots, so that calls of similar length share a graph."""

EVALUATION = "plan evaluation"
"""Kind of the records that vouch for a plan; their subject is `Preparation.subject` and the plan's text."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What `prepare` decided.

    ``dims`` are of every layer, the MTP layer last if there is one; ``plan`` is of the others. ``drafts``: tokens that
    `generate` drafts in a step at most, 0 without an MTP layer. ``share_drafts``: all of them attend to one selection.

    Copies of a model share both names of its weights: ``fingerprint`` is for caches and differs between plans,
    ``weights`` is for measurements and differs between indexers. ``mtp_weights`` names the MTP layer likewise, but for
    an attached indexer; None without one.
    """

    family_type: str
    config: DSAConfig
    selector: str
    index_topk: int
    plan: Plan
    dims: tuple[LayerDims, ...]
    drafts: int
    share_drafts: bool
    fingerprint: str
    weights: str
    mtp_weights: str | None

    def subject(self) -> dict[str, Any]:
        """What measurements are of, beside a plan: they say nothing of other weights, another selector or K."""
        return {"weights": self.weights, "selector": self.selector, "index_topk": self.index_topk}

    @property
    def draft_slots(self) -> int:
        """Slots of a cache that drafts may take behind the last token: of the model's, then of the MTP layer's."""
        return max(2 * self.drafts - 1, 0)

    def graph_options(self) -> dict[str, Any]:
        """Options for the backend; the plan is in the graph already."""
        return self.config.graph_options() | {"plan": None, "layer0": "serial"}


@dataclass(frozen=True)
class Recorded:
    """A decode step that `generate` keeps as a CUDA graph.

    Attributes:
        batch_size, capacity: of the cache that it is over. sampling: how it chooses tokens.
        bytes: of the device that it took, beside weights and cache.
    """

    batch_size: int
    capacity: int
    sampling: Sampling
    bytes: int


class PreparedModel:
    """Mixin of the model class of every family."""

    dsa: Preparation
    dsa_guard: Any  # dsa_compile.guard.Guard, one level up
    _compiled_call_impl: Callable[..., Any] | None

    def make_cache(self, batch_size: int = 1, capacity: int | None = None) -> DSACache:
        """An empty cache for this model, on its device and in its dtype where ``CacheConfig`` names no other.

        ``capacity``: slots per sequence; None takes ``CacheConfig.capacity``, else the model's context length, and room
        for drafts behind it.
        """
        context: int = self.config.max_position_embeddings  # type: ignore[attr-defined]
        capacity = capacity or self.dsa.config.cache.capacity or context + self.dsa.draft_slots
        return DSACache(
            self.dsa.dims,
            batch_size=batch_size,
            capacity=capacity,
            dtype=self.dtype,  # type: ignore[attr-defined]
            device=self.device,  # type: ignore[attr-defined]
            fp8=self.dsa.config.cache.dtype == "fp8",
            fp8_keys=self.dsa.config.cache.index_dtype == "fp8",
            mtp_width=self.config.hidden_size if self.dsa.drafts else None,  # type: ignore[attr-defined]
            fingerprint=self.dsa.fingerprint,
        )

    def workspace_bytes(self) -> int:
        """Bytes that one token of a prompt takes while it runs, beside weights and cache."""
        config: Any = self.config  # type: ignore[attr-defined]
        return token_bytes(
            self.dsa.dims[0],
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            expert_intermediate=config.moe_intermediate_size,
            routed_experts=config.num_experts_per_tok or 0,
            itemsize=self.dtype.itemsize,  # type: ignore[attr-defined]
        )

    def prompt_bytes(self, tokens: int) -> int:
        """Bytes that prompts of ``tokens`` in all take while they run: no more than ``prefill_budget``."""
        return min(self.dsa.config.prefill_budget, self.workspace_bytes() * tokens)

    def cache_for(self, batch_size: int, tokens: int) -> DSACache:
        """A cache that takes at least ``tokens``, or what ``CacheConfig.capacity`` says."""
        return self.make_cache(batch_size, self.slots_for(tokens))

    def slots_for(self, tokens: int) -> int:
        """Slots of a sequence in `cache_for`."""
        return self.dsa.config.cache.capacity or -(-max(tokens, 1) // CAPACITY_STEP) * CAPACITY_STEP

    def recordings(self) -> tuple[Recorded, ...]:
        """The CUDA graphs of plain decode steps that there are now; none on a CPU."""
        found: tuple[Recorded, ...] = self.dsa_guard.compiled.recordings()
        return found

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward in place, inside the guard. Arguments as for ``torch.compile``."""
        self.dsa_guard.compile(*args, **kwargs)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        raise InputError(
            f"set_attn_implementation({attn_implementation!r}): this model was prepared by dsa_compile and its "
            "attention is latent. Load the model again to use another implementation."
        )

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False  # the guard compiles

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, mode, batch_size, max_cache_length
            )
            return
        if generation_config.cache_implementation not in (None, "dynamic", "static"):
            raise InputError(
                f"generate(cache_implementation={generation_config.cache_implementation!r}): an optimized model keeps "
                "its tokens in a DSACache. Leave cache_implementation out."
            )
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        model_kwargs["past_key_values"] = self.dsa_guard.compiled.cache_of_generation(
            rows, max_cache_length + self.dsa.draft_slots
        )

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Greedy search and sampling of ``generate``."""
        return self.dsa_guard.sample(super()._sample, *args, **kwargs)  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if "dsa_guard" in state:
            self._compiled_call_impl = self.dsa_guard
