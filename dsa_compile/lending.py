"""Caches that ``generate`` makes for itself, and finds again, so that what was recorded over them can be replayed."""

from typing import Any
from weakref import WeakKeyDictionary

from dsa_compile.cache import DSACache
from dsa_compile.cost.capacity import Capacity
from dsa_compile.errors import CacheCapacityError
from dsa_compile.fit_table import fit_text
from dsa_compile.measure import device_memory


def bucket(batch_size: int) -> int:
    """Rows that serve so many sequences: 1, 2, 4, 8, then multiples of 8. Each number of rows is a graph of its own."""
    return -(-batch_size // 8) * 8 if batch_size > 4 else 1 << (batch_size - 1).bit_length()


class Lender:
    """One cache a `bucket`, lent to one call after another; one that a call hands out is its caller's."""

    def __init__(self) -> None:
        self._idle: dict[int, DSACache] = {}
        self._lent: WeakKeyDictionary[DSACache, DSACache] = WeakKeyDictionary()

    def lend(self, model: Any, batch_size: int, tokens: int) -> DSACache:
        """An empty cache of this many sequences, in the first rows of one that takes at least ``tokens``.

        Raises:
            CacheCapacityError: the device has no memory for it; nothing was allocated.
        """
        rows = bucket(batch_size)
        whole = self._idle.pop(rows, None)
        if whole is None or whole.capacity < tokens:
            whole = None  # before its successor takes its place
            check_memory(model, rows, tokens)
            self._make_room(model, rows, tokens)
            whole = model.cache_for(rows, tokens)
        part: DSACache = whole.first(batch_size)
        self._lent[part] = whole
        return part

    def _make_room(self, model: Any, batch_size: int, tokens: int) -> None:
        """Drop what is idle if it cannot stay beside another cache."""
        there = capacity(model, batch_size, tokens)
        idle = sum(cache.nbytes() for cache in self._idle.values())
        needed = 0 if there is None else there.token * batch_size * model.slots_for(tokens)
        if there is not None and needed + idle > there.token * there.tokens:
            self._idle.clear()

    def whole(self, cache: DSACache) -> DSACache:
        """All rows of a lent cache; any other cache as it is."""
        return self._lent.get(cache, cache)

    def give_back(self, cache: DSACache | None) -> None:
        """What was lent may be lent again; nothing else comes back."""
        whole = None if cache is None else self._lent.pop(cache, None)
        if whole is not None:
            self._idle[whole.batch_size] = whole


def check_memory(model: Any, batch_size: int, tokens: int) -> None:
    """Raise CacheCapacityError, with a table, if weights and caches of so many sequences outgrow the model's GPU."""
    there = capacity(model, batch_size, tokens)
    if there is not None and not there.fits(tokens, batch_size):
        raise CacheCapacityError(
            f"generate: {batch_size} sequences of {tokens} tokens do not fit beside the weights on {model.device}; "
            "nothing was allocated. Ask for a smaller batch or fewer tokens, or keep the cache in fp8 with "
            "optimize(model, cache={'dtype': 'fp8', 'index_dtype': 'fp8'}).\n"
            + fit_text(str(model.device), there, tokens, batch_size)
        )


def capacity(model: Any, batch_size: int, tokens: int) -> Capacity | None:
    """What the model's GPU holds in a call of so many sequences; None on a CPU."""
    memory = device_memory(model.device)
    if memory is None:
        return None
    return Capacity(
        memory=memory,
        weights=sum(p.nbytes for p in model.parameters()),
        token=sum(model.make_cache(1, 1).bytes_per_token()),
        workspace=model.prompt_bytes(batch_size * tokens),
    )
