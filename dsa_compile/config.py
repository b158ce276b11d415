"""What a user can choose, as frozen dataclasses that refuse what they do not know."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from dsa_compile.errors import ConfigError
from dsa_compile.plan import LAYER0, check_name

SELECTORS = ("indexer", "attention", "dense")
LOWERINGS = ("inductor", "eager")
PREFILLS = ("auto", "dense", "masked", "sparse")
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CACHE_DTYPES = (None, "fp8")
DEFAULT_INDEX_TOPK = 2048
"""``index_topk`` of DeepSeek-V3.2 and GLM-5, used where neither the model nor the user names one."""

MOST_DRAFTS = 16
"""Drafts of a step at most: each is one more run of the MTP layer in the step's graph."""

AUTO_DRAFTS = 3
"""Drafts at most where ``MTPConfig.drafts`` is ``"auto"``."""


def check_fields(cls: type, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first name in ``fields`` that ``cls`` does not have, naming the nearest."""
    known = [f.name for f in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            raise ConfigError(f"{cls.__name__}: unknown option {name!r}; {nearest(name, known, 'options')}")


def nearest(name: object, known: list[str], what: str) -> str:
    """The end of an error about an unknown ``name``: the one that was meant, or all there are."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"the {what} are {', '.join(known)}."


class _Options:
    """Construction from loose fields for the option dataclasses."""

    @classmethod
    def of(cls, config: Self | None = None, **fields: Any) -> Self:
        """``config`` with ``fields`` replaced, or a new one. Raises ConfigError for an unknown field."""
        check_fields(cls, fields)
        if config is None:
            return cls(**fields)
        if not isinstance(config, cls):
            raise ConfigError(f"config: expected {cls.__name__}, came {type(config).__name__}.")
        return dataclasses.replace(config, **fields)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class CacheConfig(_Options):
    """How caches are made.

    Args:
        capacity: slots per sequence; None sizes a cache for the call that makes it.
        dtype: ``"fp8"`` keeps latents in e4m3 with a scale for each 128 values and rope keys in bfloat16. None: in the
            model's dtype.
        index_dtype: ``"fp8"`` keeps index keys in e4m3 with a scale a key; over them index queries are rounded alike.
            None: in the model's dtype.
        rotate_index: multiplies index queries and keys by the orthonormal Hadamard matrix, as DeepSeek-V3.2's own code
            does: the same scores, of which fp8 loses less where queries and keys are large in the same dimensions.
            Needs an ``index_head_dim`` that is a power of two.
    """

    capacity: int | None = None
    dtype: str | None = None
    index_dtype: str | None = None
    rotate_index: bool = False

    def __post_init__(self) -> None:
        _check_count("CacheConfig.capacity", self.capacity)
        _check_choice("CacheConfig.dtype", self.dtype, CACHE_DTYPES)
        _check_choice("CacheConfig.index_dtype", self.index_dtype, CACHE_DTYPES)
        _check_choice("CacheConfig.rotate_index", self.rotate_index, (False, True))


@dataclass(frozen=True, kw_only=True)
class MTPConfig(_Options):
    """Multi-token prediction: what `generate` drafts with the MTP layer of a DeepSeek or GLM checkpoint.

    Args:
        drafts: tokens that are drafted and verified in a step, up to 16; from 2 on the one layer reads its own output.
            ``"auto"``: from 0 to 3, whatever gives most tokens a second as `generate` measures it, for each batch size;
            each number that is tried is a graph to compile.
        module: where its weights come from: a checkpoint folder, a safetensors file, a state dict or a module, with the
            names that DeepSeek gives them behind ``model.layers.{L}.``. None: the checkpoint that the model was loaded
            from.
        share_selection: whether the drafts of a step attend to the selection of the first one. None: as
            ``index_share_for_mtp_iteration`` of the model's config says (GLM-5.2), else each to its own.

    Raises:
        ConfigError: a value is out of range, or a field is unknown (through `of`).
    """

    drafts: int | str = 1
    module: str | Path | Mapping[str, Tensor] | nn.Module | None = None
    share_selection: bool | None = None

    def __post_init__(self) -> None:
        if self.drafts != "auto":
            _check_count("MTPConfig.drafts", self.drafts, "or 'auto', ")
            if self.most > MOST_DRAFTS:
                raise ConfigError(
                    f"MTPConfig.drafts: expected at most {MOST_DRAFTS}, as each is one more run of the MTP layer in a "
                    f"step's graph, came {self.drafts}. A layer trained to draft one token is rarely right past a few."
                )
        _check_choice("MTPConfig.share_selection", self.share_selection, (None, False, True))

    @property
    def most(self) -> int:
        """Drafts of a step at most."""
        return self.drafts if isinstance(self.drafts, int) else AUTO_DRAFTS


@dataclass(frozen=True, kw_only=True)
class DSAConfig(_Options):
    """Options of `optimize`, `prepare` and the backend.

    Args:
        index_topk: tokens that a query attends to; an indexer selects at most 8192. None: the model's own, else 2048
            (DeepSeek-V3.2).
        selector: what picks them. ``"indexer"``: a lightning indexer. ``"attention"``: exact top-k of the head-mean
            attention (slow; what an indexer can reach at best). ``"dense"``: nothing, attention stays dense over the
            latent cache. None: the model's own indexer, or the one that ``indexer`` or the checkpoint holds.
        indexer: where the indexer of a dense model comes from: a safetensors file or checkpoint folder, a state dict,
            or ``"random"`` (seeded). None: the checkpoint that the model was loaded from.
        index_n_heads: index heads of a ``"random"`` indexer.
        index_head_dim: dimension of an index head of a ``"random"`` indexer.
        plan: whose selection each layer attends to, and so which layers run an indexer; see `dsa_compile.plan.plan_of`.
            None: as the model is.
        layer0: under MLI, whether layer 0 waits for its own selection (``"serial"``), attends to all (``"dense"``), or
            to what it selected for the token before, and to the new token (``"previous_step"``).
        evaluation: a file that ``dsa-compile eval --out`` wrote of this model, selector, K and plan: no warning then.
        mtp: attach the checkpoint's MTP layer, with which ``generate`` drafts. None: it is left out.
        cache: how ``generate`` makes caches.
        prefill: how a prompt attends to its selection. ``"sparse"``: absorbed, over the latents of each row.
            ``"masked"``: over expanded keys and values of all slots under a mask of bits, which is faster behind a
            short context (DeepSeek-V3.2 report, on inference costs). ``"auto"``: whichever of them the cost model finds
            faster, for each piece of a prompt. ``"dense"``: to everything that it sees, without a selection; decoding
            still selects.
        select_budget: bytes of scores that a selection may hold at once.
        prefill_budget: bytes that a prompt may take beside weights and cache: a longer one runs in pieces, where the
            logits of all its tokens are not asked for.
        lowering: ``"inductor"``, or ``"eager"`` to run the rewritten graph as it is (tests, debugging).
        mode: a mode of ``torch.compile`` such as ``"max-autotune"``; needs ``lowering="inductor"``. CUDA graphs, where
            it has them, are of decode steps and drafts; each length of a prompt would be recorded anew.
        disable_passes: names of passes to leave out.

    Raises:
        ConfigError: a value is out of range, or a field is unknown (through `of`).
    """

    index_topk: int | None = None
    selector: str | None = None
    indexer: str | Path | Mapping[str, Any] | None = None
    index_n_heads: int = 64
    index_head_dim: int = 128
    plan: str | Sequence[str] | None = None
    layer0: str = "serial"
    evaluation: str | Path | None = None
    mtp: MTPConfig | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefill: str = "auto"
    select_budget: int = 256 << 20
    prefill_budget: int = 2 << 30
    lowering: str = "inductor"
    mode: str | None = None
    disable_passes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_count("index_topk", self.index_topk)
        _check_choice("selector", self.selector, (None, *SELECTORS))
        _check_choice("lowering", self.lowering, LOWERINGS)
        _check_choice("mode", self.mode, MODES)
        _check_choice("prefill", self.prefill, PREFILLS)
        _check_choice("layer0", self.layer0, LAYER0)
        check_name(self.plan)
        if self.plan is not None and not isinstance(self.plan, str):
            object.__setattr__(self, "plan", tuple(self.plan))
        for name in ("select_budget", "prefill_budget"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a positive number of bytes, came {getattr(self, name)}.")
        if self.index_n_heads < 1 or self.index_head_dim < 1:
            raise ConfigError(
                f"index_n_heads, index_head_dim: expected at least 1, came {self.index_n_heads}, {self.index_head_dim}."
            )
        if self.mode is not None and self.lowering != "inductor":
            raise ConfigError(f"mode={self.mode!r} needs lowering='inductor', came lowering={self.lowering!r}.")
        if isinstance(self.disable_passes, str):
            raise ConfigError(f"disable_passes: expected names in a list, came the string {self.disable_passes!r}.")
        object.__setattr__(self, "disable_passes", tuple(self.disable_passes))
        if isinstance(self.cache, Mapping):
            object.__setattr__(self, "cache", CacheConfig.of(**self.cache))
        if not isinstance(self.cache, CacheConfig):
            raise ConfigError(f"cache: expected CacheConfig or a dict of its fields, came {type(self.cache).__name__}.")
        if isinstance(self.mtp, Mapping):
            object.__setattr__(self, "mtp", MTPConfig.of(**self.mtp))
        if self.mtp is not None and not isinstance(self.mtp, MTPConfig):
            raise ConfigError(f"mtp: expected MTPConfig or a dict of its fields, came {type(self.mtp).__name__}.")
        if self.selector == "dense" and (self.plan not in (None, "own") or self.layer0 != "serial"):
            raise ConfigError(f"plan={self.plan!r}: selector='dense' selects nothing that a plan could share.")
        if self.mtp is not None and self.layer0 == "previous_step":
            raise ConfigError(
                "layer0='previous_step' with mtp=: the selection of the token before may be that of a rejected draft. "
                "Choose layer0='serial' or 'dense', or leave mtp= out."
            )
        if self.indexer is not None and self.selector in ("attention", "dense"):
            raise ConfigError(f"indexer= is read by selector='indexer' alone, came selector={self.selector!r}.")

    def graph_options(self) -> dict[str, Any]:
        """The fields that shape a compiled graph, as ``options=`` of ``torch.compile``."""
        names = ("index_topk", "selector", "plan", "layer0", "prefill", "select_budget")
        return {name: getattr(self, name) for name in (*names, "lowering", "mode", "disable_passes")}


def _check_count(name: str, value: object, other: str = "") -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name}: expected a whole number of at least 1, {other}came {value!r}.")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}: expected one of {', '.join(map(repr, choices))}, came {value!r}.")
