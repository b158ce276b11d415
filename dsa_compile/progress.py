"""The host's account of a generation: the tokens of each sequence, where it ends, and what a streamer has had."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


class Progress:
    """Sequences that grow at different speeds, and end as under transformers' criteria.

    Attributes:
        tokens: new tokens of each sequence. finished: which have ended.
        limit: new tokens of a sequence at most.
    """

    def __init__(
        self, input_ids: Tensor, stopping_criteria: StoppingCriteriaList, config: GenerationConfig, streamer: Any
    ) -> None:
        self.input_ids, self.streamer = input_ids, streamer
        self.tokens: list[list[int]] = [[] for _ in input_ids]
        self.finished = [False for _ in input_ids]
        self.limit = int(stopping_criteria.max_length or 0) - input_ids.shape[1]
        pad: Any = config._pad_token_tensor
        self._pad = 0 if pad is None else int(pad)
        self._eos = {t for c in stopping_criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.tolist()}
        self._others = StoppingCriteriaList(c for c in stopping_criteria if not is_length_or_eos(c))
        self._streamed = 0

    def take(self, blocks: list[list[int]]) -> list[int]:
        """Append its block to each unfinished sequence, up to where it ends; returns how many tokens each took."""
        taken = [self._take(row, block) for row, block in enumerate(blocks)]
        if self.streamer is not None:
            self._stream()
        return taken

    def _take(self, row: int, block: list[int]) -> int:
        for count, token in enumerate(block):
            if self.finished[row]:
                return count
            self.tokens[row].append(token)
            self.finished[row] = self._ends(row)
        return len(block)

    def _ends(self, row: int) -> bool:
        tokens = self.tokens[row]
        if len(tokens) >= self.limit or tokens[-1] in self._eos:
            return True
        return len(self._others) > 0 and bool(self._others(self.prefix(row), None))

    def outlasts_a_step(self) -> bool:
        """Whether a sequence may go on behind a step that gives a token to each."""
        return any(not end and len(tokens) + 1 < self.limit for tokens, end in zip(self.tokens, self.finished))

    def prefix(self, row: int, drafts: list[int] | None = None) -> Tensor:
        """int64[1, T]: the prompt and all tokens of a sequence, with its padding, and ``drafts`` behind them."""
        return torch.cat([self.input_ids[row], self.input_ids.new_tensor(self.tokens[row] + (drafts or []))])[None]

    def _stream(self) -> None:
        """Hand out the columns that every sequence has, or has ended before, as transformers does."""
        while self._streamed < max(map(len, self.tokens)) and all(
            end or len(tokens) > self._streamed for tokens, end in zip(self.tokens, self.finished)
        ):
            self.streamer.put(self._columns(self._streamed, self._streamed + 1)[:, 0])
            self._streamed += 1

    def _columns(self, start: int, end: int) -> Tensor:
        rows = (tokens[start:end] for tokens in self.tokens)
        return torch.tensor([row + [self._pad] * (end - start - len(row)) for row in rows])

    def sequences(self) -> Tensor:
        """int64[B, T] of prompts and new tokens, padded behind the end."""
        return torch.cat([self.input_ids, self._columns(0, max(map(len, self.tokens))).to(self.input_ids)], 1)


def is_length_or_eos(criterion: Any) -> bool:
    """Whether a stopping criterion looks at nothing but the last token and the length."""
    return isinstance(criterion, (MaxLengthCriteria, EosTokenCriteria))
