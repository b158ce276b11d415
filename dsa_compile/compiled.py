"""What a prepared model runs through ``torch.compile``, and in CUDA graphs of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dsa_compile import compat
from dsa_compile.backend import dsa_backend
from dsa_compile.cache import DSACache
from dsa_compile.lending import Lender, check_memory
from dsa_compile.models.mtp_step import UNCOMPILED, Graphs
from dsa_compile.models.plain_step import plain_step
from dsa_compile.models.prepared import Recorded
from dsa_compile.replay import Decoder, addresses
from dsa_compile.replay_drafts import DraftDecoder
from dsa_compile.sampling import Sampling


class Compiled:
    """Functions of a model, each made once, and their recordings over its caches.

    Attributes:
        arguments: of ``torch.compile``, positional and by name; None: nothing is compiled.
        lender: memory of caches that recordings hold the addresses of.
    """

    def __init__(self, model: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> None:
        self._model, self.arguments, self.lender = model, arguments, Lender()
        self._graphs: dict[tuple[int, int | None], Graphs] = {}
        self._plain_steps: dict[int, Callable[..., Any]] = {}  # by batch size
        self._decoders: WeakKeyDictionary[DSACache, tuple[tuple[int, ...], dict[Any, Any]]] = WeakKeyDictionary()

    def function(
        self, function: Callable[..., Any], name: str | None = None, *, captured: bool = False
    ) -> Callable[..., Any]:
        """``function`` as one graph; ``captured``: in a CUDA graph of ours, which holds none of Inductor's."""
        if self.arguments is None:
            return function
        args, kwargs = self.arguments
        kwargs = _without_cuda_graphs(kwargs) if captured else kwargs
        compiled: Callable[..., Any] = torch.compile(compat.own_code(function, name), *args, **kwargs)
        return compiled

    def graphs(self, width: int, batch_size: int | None = None) -> Graphs:
        """What drafting runs in steps of ``width`` rows; each width apart, so that it is static.

        ``batch_size``: in CUDA graphs of ours, each batch size apart as well.
        """
        key, captured = (width, batch_size), batch_size is not None
        if key not in self._graphs:
            name = f"{width}_{batch_size}" if captured else str(width)
            made = (self.function(f, f"{f.__name__}_{name}", captured=captured) for f in UNCOMPILED)
            self._graphs[key] = Graphs(*made)
        return self._graphs[key]

    @property
    def replays(self) -> bool:
        """Whether plain decoding runs in CUDA graphs of its own, which take what Inductor compiled for a GPU.

        Not where experts are grouped in a dtype other than bfloat16: there grouped_mm waits for the device.
        """
        model = self._model
        if model.dtype != torch.bfloat16 and model.config._experts_implementation != "batched_mm":
            return False
        backend = self.arguments and self.arguments[1].get("backend")
        inductor = backend in ("dsa", dsa_backend) and model.dsa.config.lowering == "inductor"
        return inductor and model.device.type == "cuda"

    def cache_of_generation(self, batch_size: int, tokens: int) -> DSACache:
        """An empty cache for a call of ``generate``, in memory of an earlier call where there is some.

        Raises:
            CacheCapacityError: the device has no memory for it; nothing was allocated.
        """
        if self.replays:
            return self.lender.lend(self._model, batch_size, tokens)
        check_memory(self._model, batch_size, tokens)
        cache: DSACache = self._model.cache_for(batch_size, tokens)
        return cache

    def decoder(self, cache: DSACache, sampling: Sampling) -> Decoder:
        """Plain steps over a cache."""

        def made(cache: DSACache) -> Decoder:
            B = cache.batch_size
            if B not in self._plain_steps:  # each batch size apart, so that it is static
                self._plain_steps[B] = self.function(plain_step, f"plain_step_{B}", captured=True)
            return Decoder(self._model, self._plain_steps[B], cache, sampling, recorded=self.replays)

        found: Decoder = self._found(cache, Decoder, sampling, made)
        return found

    def drafter(self, cache: DSACache, sampling: Sampling) -> DraftDecoder:
        """Steps with drafts over a cache."""

        def made(cache: DSACache) -> DraftDecoder:
            graphs = partial(self.graphs, batch_size=cache.batch_size)
            return DraftDecoder(self._model, graphs, cache, sampling, recorded=self.replays)

        found: DraftDecoder = self._found(cache, DraftDecoder, sampling, made)
        return found

    def _found(self, cache: DSACache, kind: type, sampling: Sampling, make: Callable[[DSACache], Any]) -> Any:
        """What ``make`` makes of a cache, once for as long as all stays where it lies."""
        cache = self.lender.whole(cache)
        where = addresses(self._model, cache)
        if cache not in self._decoders or self._decoders[cache][0] != where:
            self._decoders[cache] = (where, {})
        made = self._decoders[cache][1]
        if (kind, sampling) not in made:
            made[kind, sampling] = make(cache)
        return made[kind, sampling]

    def recordings(self) -> tuple[Recorded, ...]:
        """What `decoder` and `drafter` made and still keep, in CUDA graphs."""
        return tuple(
            Recorded(cache.batch_size, cache.capacity, sampling, made.bytes)
            for cache, (_, by_kind) in self._decoders.items()
            for (_, sampling), made in by_kind.items()
        )


def _without_cuda_graphs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments of ``torch.compile`` under a mode that makes no CUDA graphs."""
    options = dict(kwargs.get("options") or {})
    mode = compat.without_cuda_graphs(kwargs.get("mode") or options.get("mode"))
    return {**kwargs, "mode": None, "options": {**options, "mode": mode}}
