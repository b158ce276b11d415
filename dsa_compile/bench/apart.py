"""Measurements that leave nothing behind."""

import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.synchronize import Barrier, Lock
from typing import Any, TypeVar

T = TypeVar("T")

_met: tuple[Barrier, Lock] | None = None
"""In a process of `side_by_side` that was not in its turn yet: where all meet, and who has the device."""


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call it in a process of its own.

    On an H200 a whole step took 9 % longer in a process in which a plan had run on two streams before.
    """
    (result,) = side_by_side(function, [arguments])
    return result


def side_by_side(function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    """Call it with each of ``calls``, each in a process of its own: what precedes `turn` runs at once."""
    context = get_context("spawn")
    meet = context.Barrier(len(calls)), context.Lock()
    with ProcessPoolExecutor(len(calls), context, initializer=_begin, initargs=meet) as pool:
        return [future.result() for future in [pool.submit(_call, function, arguments) for arguments in calls]]


def within(
    seconds: float | None, function: Callable[..., object], calls: Sequence[tuple[Any, ...]]
) -> list[int | None]:
    """Like `side_by_side`, but what runs longer, if ``seconds`` are given, is ended; exit codes, None of those.

    Where one is killed the others are ended too: it may be the one that they wait for.
    """
    context = get_context("spawn")
    meet = context.Barrier(len(calls)), context.Lock()
    started = [context.Process(target=_call_in, args=(meet, function, arguments)) for arguments in calls]
    end = None if seconds is None else time.monotonic() + seconds
    for process in started:
        process.start()
    running = list(started)
    while running and (end is None or time.monotonic() < end):
        wait([process.sentinel for process in running], None if end is None else max(0.0, end - time.monotonic()))
        running = [process for process in running if process.is_alive()]
        if any((process.exitcode or 0) < 0 for process in started):
            break
    for process in running:
        process.kill()
        process.join()
    return [None if process in running else process.exitcode for process in started]


@contextmanager
def turn() -> Iterator[None]:
    """Within it nobody else of `side_by_side` or `within` uses the device; to be entered once."""
    global _met
    if _met is None:
        yield
        return
    (barrier, lock), _met = _met, None
    barrier.wait()
    with lock:
        yield


def _begin(barrier: Barrier, lock: Lock) -> None:
    global _met
    _met = barrier, lock


def _call_in(meet: tuple[Barrier, Lock], function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    _begin(*meet)
    _call(function, arguments)


def _call(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    try:
        return function(*arguments)
    except Exception as error:
        raise _portable(error) from None
    finally:
        with turn():  # where the call did not get so far: the others wait for it
            pass


def _portable(error: Exception) -> Exception:
    """The error itself or, where it does not survive the way between processes, what it says."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
