"""Selection plans: which layers run an indexer, and whose selection each layer attends to.

IndexCache (arXiv 2603.12201) lets a layer reuse the selection of an indexer before it. The Multi-layer Indexer (MLI)
lets a layer that runs its indexer attend to the selection of the indexer before, so that its own is not waited for.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsa_compile.errors import ConfigError

LAYER0 = ("serial", "dense", "previous_step")
"""What layer 0, which has none before it, attends to.

Its own selection; every visible token; or its own selection of the token before and the new token, so that it waits for
nothing either.
"""

FORMS = (
    "own, model, mli, share:1/4, share:FSSS..., mli+share:1/4, or a list of own, previous, from:j and dense "
    "(previous_step for layer 0)"
)
UNMARKED, EVERYTHING, PREVIOUS_STEP = -1, -2, -3
"""What ``selection_of`` of ``dsa::mla`` says beside the number of a layer."""

DEFAULT_OFFSET = 2
"""``index_skip_topk_offset`` where a config has none (transformers, vLLM)."""


@dataclass(frozen=True)
class Plan:
    """``sources[i]``: the layer whose selection layer i attends to; None: every visible token.

    ``previous_step``: layer 0 attends to what it selected for the token before, and to the new token.
    """

    sources: tuple[int | None, ...]
    previous_step: bool = False

    @property
    def owners(self) -> frozenset[int]:
        """Layers whose selection somebody attends to: the others run no indexer and keep no index keys."""
        return frozenset(s for s in self.sources if s is not None)

    @property
    def letters(self) -> str:
        """One a layer. F: runs its indexer and attends to it. L: runs its indexer, attends to an earlier selection.

        S: runs none, attends to an earlier selection. D: attends to everything, whether or not it runs one for others.
        """
        return "".join(self._letter(i) for i in range(len(self.sources)))

    @property
    def reuses(self) -> bool:
        """Whether some layer attends to a selection that is not its own of that token."""
        return self.previous_step or any(s not in (i, None) for i, s in enumerate(self.sources))

    def text(self) -> tuple[str, ...]:
        """As an explicit list, which `plan_of` reads back."""
        entries = ["dense" if s is None else "own" if s == i else f"from:{s}" for i, s in enumerate(self.sources)]
        return ("previous_step", *entries[1:]) if self.previous_step else tuple(entries)

    def mark(self, layer: int) -> int:
        """What ``selection_of`` of ``dsa::mla`` says of a layer."""
        if layer == 0 and self.previous_step:
            return PREVIOUS_STEP
        source = self.sources[layer]
        return EVERYTHING if source is None else source

    def _letter(self, layer: int) -> str:
        source = self.sources[layer]
        if source is None:
            return "D"
        runs, late = layer in self.owners, source != layer or self.mark(layer) == PREVIOUS_STEP
        return "F" if runs and not late else "L" if runs else "S"


def plan_of(
    wanted: str | Sequence[str] | None,
    with_indexer: Sequence[bool],
    *,
    layer0: str = "serial",
    model_config: Any = None,
) -> Plan:
    """The plan that ``wanted`` names for a model.

    Args:
        wanted: ``"own"`` (or None): as the model is. ``"share:1/4"``: of each 4 layers one runs its indexer, at the
            places of ``index_topk_freq = 4``; ``"share:FSSF"``: a letter a layer. ``"mli"``, alone or joined to a share
            by ``+`` in any order. ``"model"``: what the config says. Or a list: ``"own"``, ``"previous"`` (the layer
            before), ``"from:j"``, ``"dense"``, for layer 0 ``"previous_step"``.
        with_indexer: which layers have an indexer; the others share the selection before them.
        layer0: of `LAYER0`; the latter two under ``"mli"`` alone.
        model_config: with ``indexer_types``, ``index_topk_pattern``, ``index_topk_freq``, ``index_skip_topk_offset``.

    Raises:
        ConfigError: the plan is unknown, has another number of layers, begins with a shared layer, or reads from a
            later layer or one without an indexer.
    """
    layers = len(with_indexer)
    if not isinstance(wanted, (str, type(None))):
        sources = tuple(_source(entry, i, with_indexer) for i, entry in enumerate(_of_length(wanted, layers)))
        plan = Plan(sources, wanted[0] == "previous_step")
        mli = any(s not in (i, None) and i in plan.owners for i, s in enumerate(sources))
    else:
        parts = [part.strip() for part in (wanted or "own").split("+")]
        _check_parts(parts, wanted)
        runs = list(with_indexer)
        for part in parts:
            if part not in ("own", "mli"):
                runs = _sharing(part, with_indexer, model_config)
        mli = "mli" in parts
        plan = Plan(_late(runs) if mli else _shared(runs))
    if plan.sources[0] not in (0, None):
        raise ConfigError(f"plan: layer 0 must own its selection, since none is before it; came {wanted!r}.")
    if layer0 == "serial":
        return plan
    if not mli:
        raise ConfigError(f"layer0={layer0!r} is for plans with 'mli', whose layer 0 would wait; came plan={wanted!r}.")
    return Plan((None, *plan.sources[1:])) if layer0 == "dense" else Plan(plan.sources, previous_step=True)


def check_name(wanted: Any) -> None:
    """Raise ConfigError for what is no plan of any model."""
    if isinstance(wanted, str):
        _check_parts([part.strip() for part in wanted.split("+")], wanted)
    elif wanted is not None and not (isinstance(wanted, Sequence) and all(isinstance(e, str) for e in wanted)):
        raise ConfigError(f"plan: expected a string or a list of them, came {wanted!r}.")


def retention_period(share: str) -> int:
    """r of ``"1/r"``.

    Raises:
        ConfigError: that is no such fraction, or lies outside (0, 1].
    """
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    if match is None or int(match[1]) != 1 or int(match[2]) < 1:
        raise ConfigError(f"plan: expected a retention 1/1, 1/2, 1/3, ... in (0, 1], came {share!r}.")
    return int(match[2])


def _check_parts(parts: list[str], wanted: Any) -> None:
    for part in parts:
        name, colon, value = part.partition(":")
        if name not in ("own", "mli", "share", "model") or (name == "share") != bool(colon) or (colon and not value):
            raise ConfigError(f"plan: unknown {wanted!r}; the plans are {FORMS}.")
        if name == "share":
            retention_period(value) if "/" in value else _check_letters(value)
    if len(set(parts)) < len(parts) or sum(p != "mli" for p in parts) > 1:
        raise ConfigError(f"plan: expected at most one of own, share and model, and mli once; came {wanted!r}.")


def _check_letters(value: str) -> None:
    odd = "".join(sorted(set(value) - {"F", "S"}))
    if odd:
        raise ConfigError(f"plan: expected letters F (runs its indexer) and S (shares), came {odd!r} in {value!r}.")


def _of_length(entries: Sequence[Any], layers: int) -> Sequence[Any]:
    if len(entries) != layers:
        raise ConfigError(f"plan: expected an entry for each of {layers} layers, came {len(entries)}.")
    return entries


def _sharing(part: str, with_indexer: Sequence[bool], model_config: Any) -> list[bool]:
    """Which layers run their indexer."""
    layers = len(with_indexer)
    if part == "model":
        runs = _of_config(model_config, layers)
    elif "/" in part:
        runs = _every(retention_period(part.removeprefix("share:")), _offset(model_config), layers)
    else:
        runs = [letter == "F" for letter in _of_length(part.removeprefix("share:"), layers)]
    if not runs[0]:
        raise ConfigError(f"plan: {part!r} starts with a shared layer, but none is before it. Start with F.")
    lacking = [i for i, (run, has) in enumerate(zip(runs, with_indexer)) if run and not has]
    if lacking:
        raise ConfigError(f"plan: {part!r} wants the indexers of layers {lacking}, which have none.")
    return runs


def _of_config(model_config: Any, layers: int) -> list[bool]:
    """``indexer_types``, else ``index_topk_pattern``, else ``index_topk_freq`` with ``index_skip_topk_offset``."""
    types = getattr(model_config, "indexer_types", None)
    pattern = getattr(model_config, "index_topk_pattern", None)
    if types is not None:
        odd = sorted({str(kind) for kind in types} - {"full", "shared"})
        if odd or len(types) < layers:
            raise ConfigError(
                f"config.indexer_types: expected 'full' or 'shared' for each of {layers} layers, came {list(types)}."
            )
        return [kind == "full" for kind in types[:layers]]
    if pattern is not None:
        _check_letters(pattern)
        return [letter == "F" for letter in _of_length(pattern, layers)]
    return _every(getattr(model_config, "index_topk_freq", None) or 1, _offset(model_config), layers)


def _offset(model_config: Any) -> int:
    offset = getattr(model_config, "index_skip_topk_offset", None)
    return DEFAULT_OFFSET if offset is None else offset


def _every(freq: int, offset: int, layers: int) -> list[bool]:
    return [max(i - offset + 1, 0) % freq == 0 for i in range(layers)]


def _shared(runs: list[bool]) -> tuple[int, ...]:
    """Each layer attends to the nearest indexer at or before it."""
    return tuple(max((j for j in range(i + 1) if runs[j]), default=-1) for i in range(len(runs)))


def _late(runs: list[bool]) -> tuple[int, ...]:
    """A layer that runs its indexer attends to the one before, so that a layer that shares finds its own done."""
    nearest_one = _shared(runs)
    return tuple(nearest_one[i - 1] if i > 0 and runs[i] else nearest_one[i] for i in range(len(runs)))


def _source(entry: str, layer: int, with_indexer: Sequence[bool]) -> int | None:
    if entry == "dense":
        return None
    if entry == "previous_step" and layer == 0:
        return 0
    named = re.fullmatch(r"from:(\d+)", entry)
    if entry not in ("own", "previous") and named is None:
        raise ConfigError(f"plan: layer {layer}: expected own, previous, from:j or dense, came {entry!r}.")
    source = int(named[1]) if named else layer - (entry == "previous")
    if source > layer:
        raise ConfigError(f"plan: layer {layer}: expected a selection of this layer or an earlier one, came {entry!r}.")
    if source >= 0 and not with_indexer[source]:
        raise ConfigError(f"plan: layer {layer}: {entry!r} reads from layer {source}, which has no indexer.")
    return source
