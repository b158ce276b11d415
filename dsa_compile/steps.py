"""The two ways of a step: logits processed inside its one graph, or by transformers between two graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from dsa_compile import compat
from dsa_compile.cache import DSACache
from dsa_compile.models.mtp_step import Graphs, Place
from dsa_compile.progress import Progress
from dsa_compile.sampling import Sampling

Stepped = tuple[Tensor, Tensor, Tensor, Tensor]
"""What a step gives: see `dsa_compile.models.mtp_step.step`."""


class InGraph:
    """Steps of one graph each. Tokens so far stay on the device, for a repetition penalty."""

    def __init__(
        self, model: Any, graphs: Callable[[int], Graphs], cache: DSACache, sampling: Sampling, progress: Progress
    ) -> None:
        self._model, self._graphs, self._cache, self._sampling = model, graphs, cache, sampling
        self._history: Tensor | None = None
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            prompt = progress.input_ids
            rest = prompt.new_zeros(prompt.shape[0], progress.limit + model.dsa.drafts)
            self._history = torch.cat([prompt, rest], 1)
            self._seen = torch.full_like(prompt[:, 0], prompt.shape[1])
            compat.hint_dynamic(self._history, 1)

    def __call__(self, tokens: Tensor, place: Place) -> Stepped:
        if self._history is not None and self._seen is not None:
            columns = self._seen[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            self._history.scatter_(1, columns.clamp(max=self._history.shape[1] - 1), tokens)
        uniforms = _uniforms(tokens, self._sampling.greedy)
        block, accepted, drafts, states = self._graphs(tokens.shape[1]).step(
            self._model, self._cache, tokens, place, self._sampling, uniforms, self._history, self._seen
        )
        if self._seen is not None:
            self._seen = self._seen + accepted + 1
        return block, accepted, drafts, states


class BetweenGraphs:
    """Steps of two graphs, between which transformers' processors see each row behind the tokens that precede it."""

    def __init__(
        self,
        model: Any,
        graphs: Callable[[int], Graphs],
        cache: DSACache,
        processors: LogitsProcessorList,
        progress: Progress,
        greedy: bool,
    ) -> None:
        self._model, self._graphs, self._cache = model, graphs, cache
        self._processors, self._progress, self._greedy = processors, progress, greedy

    def __call__(self, tokens: Tensor, place: Place) -> Stepped:
        graphs = self._graphs(tokens.shape[1])
        logits, states = graphs.verify(self._model, self._cache, tokens, place)
        states = states.clone()  # as under CUDA graphs the next graph may write where they lie
        target = self._processed(logits.float(), tokens[:, 1:].tolist())
        block, accepted, drafts = graphs.settle(
            self._model, self._cache, target, tokens, states, place, _uniforms(tokens, self._greedy), self._greedy
        )
        return block, accepted, drafts, states

    def _processed(self, logits: Tensor, drafts: list[list[int]]) -> Tensor:
        target = logits.clone()
        for row, finished in enumerate(self._progress.finished):
            for column in range(0 if finished else logits.shape[1]):
                prefix: Any = self._progress.prefix(row, drafts[row][:column])
                target[row, column] = self._processors(prefix, logits[row, column][None].clone())[0]  # type: ignore[arg-type]
        return target if self._greedy else target.softmax(-1)


def _uniforms(tokens: Tensor, greedy: bool) -> Tensor:
    made: Tensor = (torch.zeros if greedy else torch.rand)(tokens.shape, device=tokens.device)
    return made
