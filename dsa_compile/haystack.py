"""Questions about codes planted in any text, at any length and depth, as RULER's needles (arXiv 2404.06654)."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dsa_compile.errors import ConfigError
from dsa_compile.texts import plain_tokens

ASKED = {
    "single": "\nRecall: the code of {} is",
    "multi-key": "\nRecall: the code of {} is",
    "multi-value": "\nRecall: the codes of {} are",
}
"""What a prompt of each kind ends in."""
PLANTED = 4
"""Codes in a prompt of several keys or values."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt, int64[length], whose continuation should say the ``answers``, in any order."""

    kind: str
    length: int
    depth: float
    prompt: Tensor
    answers: tuple[str, ...]

    def is_answered(self, said: str) -> bool:
        """Whether the first numbers of a continuation are the answers."""
        return sorted(re.findall(r"\d+", said)[: len(self.answers)]) == sorted(self.answers)


@dataclass(frozen=True, kw_only=True)
class NeedleSuite:
    """Which questions are asked.

    Args:
        kinds: ``"single"``: one code is planted. ``"multi-key"``: codes of other names are, too. ``"multi-value"``: all
            codes are of one name, and all of them are asked for.
        lengths: tokens of a prompt, with its question; none: as long as the rows of text.
        depths: where the code that is asked for lies, the first of them: from 0, the start of the text, to 1. Others
            lie anywhere.
        repeats: questions of each kind at each length and depth. seed: of names, codes and where the text begins.

    Raises:
        ConfigError: a value is out of range.
    """

    kinds: Sequence[str] = tuple(ASKED)
    lengths: Sequence[int] = ()
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in ASKED]:
            raise ConfigError(f"kinds: expected some of {', '.join(ASKED)}, came {unknown[0]!r}.")
        if outside := [depth for depth in self.depths if not 0 <= depth <= 1]:
            raise ConfigError(f"depths: expected shares of the text, from 0 to 1, came {outside[0]}.")
        if self.repeats < 1:
            raise ConfigError(f"repeats: expected at least 1, came {self.repeats}.")

    def questions(self, haystack: Tensor, tokenizer: Any, tokens: int) -> list[Question]:
        """The questions about a text of tokens int64[any], which begins anew where it ends.

        Args:
            tokens: length of a prompt where the suite names none.

        Raises:
            ConfigError: a length has no room for what is planted.
        """
        rng = random.Random(self.seed)
        return [
            _question(kind, length, depth, haystack, tokenizer, rng)
            for kind in self.kinds
            for length in self.lengths or (tokens,)
            for depth in self.depths
            for _ in range(self.repeats)
        ]


def _question(kind: str, length: int, depth: float, haystack: Tensor, tokenizer: Any, rng: random.Random) -> Question:
    count = 1 if kind == "single" else PLANTED
    names = _names(count, rng)
    codes = [str(code) for code in rng.sample(range(1000, 10_000), count)]
    if kind == "multi-value":
        names = names[:1] * count
    planted = [plain_tokens(tokenizer, f"\nThe code of {name} is {code}.\n") for name, code in zip(names, codes)]
    start = torch.tensor([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id], dtype=torch.int64)
    end = plain_tokens(tokenizer, ASKED[kind].format(names[0]))
    room = length - len(start) - len(end) - sum(map(len, planted))
    if room < 1:
        raise ConfigError(f"lengths: expected more than {length - room} tokens for a {kind} question, came {length}.")
    text = haystack[(torch.arange(room) + rng.randrange(len(haystack))) % len(haystack)]
    places = [round(depth * room), *(rng.randrange(room + 1) for _ in range(count - 1))]
    parts, done = [start], 0
    for place, sentence in sorted(zip(places, planted), key=itemgetter(0)):
        parts += [text[done:place], sentence]
        done = place
    prompt = torch.cat([*parts, text[done:], end])
    answers = codes if kind == "multi-value" else codes[:1]
    return Question(kind=kind, length=length, depth=depth, prompt=prompt, answers=tuple(answers))


def _names(count: int, rng: random.Random) -> list[str]:
    """Different words that no text has."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice("bdfgjklmnprtvz") + rng.choice("aeiou") for _ in range(3))] = None
    return [*names]
