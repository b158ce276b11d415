"""Steps with drafts that feed themselves: on a GPU each is one replay of a CUDA graph."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from dsa_compile.cache import DSACache
from dsa_compile.models.mtp_step import Graphs, Place
from dsa_compile.replay import Landings, end, nowhere, put, record
from dsa_compile.sampling import Sampling
from dsa_compile.steps import Arriving


class DraftDecoder:
    """Steps that verify drafts and draft again, of any number of drafts, each number in a recording of its own.

    As in `dsa_compile.replay.Decoder` all lies in place, and a recording is good for as long as `addresses` stay. A
    sequence that has all its tokens ends on the device, before the host knows. What a step gives lies in one of two
    places, and travels to the host while the next step fills the other.

    Args:
        graphs: by the width of a step, compiled or not. cache: of which ``start`` may use the first sequences.
        recorded: capture steps in CUDA graphs, for which ``graphs`` must be compiled for the model's GPU.

    Attributes:
        bytes: of the device that the recordings took.
    """

    looks_ahead = True

    def __init__(
        self, model: Any, graphs: Callable[[int], Graphs], cache: DSACache, sampling: Sampling, *, recorded: bool
    ) -> None:
        B, W, device = cache.batch_size, model.dsa.drafts + 1, cache.device
        self._model, self._graphs, self._sampling = model, graphs, sampling
        self._cache = ref(cache)  # whose end is that of the recordings
        self._tokens = torch.zeros(B, W, dtype=torch.int64, device=device)
        self._place = nowhere(B, device)
        self._last = torch.zeros(B, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(B, W, device=device)
        self._before = torch.zeros(B, W, model.config.hidden_size, dtype=model.dtype, device=device)
        self._landings = Landings(B, 1 + W, device)
        self._states = torch.zeros(2, *self._before.shape, dtype=model.dtype, device=device)
        self._steps: dict[int, Callable[[], None]] = {}
        self._starts: dict[int, Callable[[], None]] = {}
        self._rows, self._recorded, self.bytes = B, recorded, 0

    def start(self, first: Tensor, state: Tensor, place: Place, new: int, drafts: int) -> None:
        """Set where sequences are, and draft what follows their first tokens.

        Args:
            first: int64[B, 1], the last tokens, which no cache holds yet; the cache may have more rows.
            state: [B, hidden], of the tokens before. place: of sequences, ``first`` not counted.
            new: tokens that a sequence gets at most, ``first`` counted.
        """
        B, width = first.shape[0], drafts + 1
        self._rows = B
        put(self._place, place)
        self._last[:B] = place.valid + new - 1
        self._tokens[:B] = first
        self._before[:B] = state[:, None]
        self._landings.begin()
        if width not in self._starts:
            self._starts[width] = self._start_of(width)
        self._starts[width]()

    def advance(self, drafts: int) -> Arriving:
        """Start a step; what it gives is there until the step behind the next one is started."""
        width = drafts + 1
        if width not in self._steps:
            self._steps[width] = self._step_of(width)
        if not self._sampling.greedy:
            self._uniforms.uniform_()
        self._steps[width]()
        landing, place = self._landings.send(self._rows)
        return Arriving(drafts, landing.wait, self._states[place])

    def finish(self, finished: list[bool]) -> None:
        """Leave these sequences as they are from the next step on, without a wait for the device."""
        end(self._place, finished)

    def _start_of(self, width: int) -> Callable[[], None]:
        """What drafts behind the first tokens, in place."""
        draft, cache = self._graphs(width).draft, self._cache()
        tokens, states, count = self._tokens[:, :width], self._before[:, :width], torch.ones_like(self._last)

        def start() -> None:
            tokens.copy_(draft(self._model, cache, tokens, states, count, self._place))

        return self._in_place(start, [tokens])

    def _step_of(self, width: int) -> Callable[[], None]:
        """What verifies and drafts again, in place."""
        step, cache = self._graphs(width).ongoing, self._cache()
        tokens, uniforms = self._tokens[:, :width], self._uniforms[:, :width]
        turn, landed = self._landings.turn, self._landings.tokens[..., : 1 + width]
        states = self._states[:, :, :width]

        def advance() -> None:
            place, last = self._place, self._last
            step(self._model, cache, tokens, place, last, self._sampling, uniforms, turn, landed, states)

        return self._in_place(advance, [turn, landed, states, tokens, self._place.valid])

    def _in_place(self, run: Callable[[], None], written: Iterable[Tensor]) -> Callable[[], None]:
        """``run`` or, where steps are recorded, a replay of it; what it writes is as before."""
        if not self._recorded:
            return run
        before = [(ours, ours.clone()) for ours in (*written, self._place.alive)]
        self._place.alive.zero_()  # the run that compiles is none of the sequences'
        replay, taken = record(run, self._tokens.device)
        for ours, tensor in before:
            ours.copy_(tensor)
        self.bytes += taken
        return replay
