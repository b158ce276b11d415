"""The distribution that tokens are drawn from: transformers' logits processors as tensor code for a compiled graph."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from dsa_compile.errors import ConfigError, InputError

if TYPE_CHECKING:
    from transformers import GenerationConfig

ABSENT = {
    "guidance_scale": (None, 1),
    "sequence_bias": (None,),
    "encoder_repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "remove_invalid_values": (None, False),
    "exponential_decay_length_penalty": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "watermarking_config": (None,),
    "num_beams": (None, 1),
}
"""Fields of a GenerationConfig that `Sampling` does not serve, and the values with which they ask for nothing."""

ABSENT_FROM_SAMPLING = {
    "top_h": (None,),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0, 1),
    "eta_cutoff": (None, 0, 1),
}
"""The same for those that transformers reads with ``do_sample`` alone."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What transformers' processors do to logits, in its order: the fields from ``repetition_penalty`` down.

    A number is part of a compiled graph, and one that changes nothing leaves no trace in it. A tensor [B] has one for
    each sequence and is an input of the graph; its values are not checked.

    Args:
        greedy: the likeliest token is taken; of the others only ``repetition_penalty`` counts.
        repetition_penalty: above 0; logits of tokens in the history are divided by it, or multiplied below 0.
        temperature: above 0; logits are divided by it.
        top_k: the k best tokens are kept, and those equal to the last of them. 0: all.
        top_p: the best tokens are kept that together reach this probability, and at least one.
        min_p: tokens are kept that have this share of the best one's probability.
        seen: bool[B, vocab], tokens in the history of every row, where `target` gets none; it is not compared.

    Raises:
        ConfigError: a number is outside its range.
    """

    greedy: bool = False
    repetition_penalty: float | Tensor = 1.0
    temperature: float | Tensor = 1.0
    top_k: int | Tensor = 0
    top_p: float | Tensor = 1.0
    min_p: float | Tensor = 0.0
    seen: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("repetition_penalty", "temperature"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and not value > 0:
                raise ConfigError(f"Sampling.{name}: expected a number above 0, came {value!r}. Greedy: greedy=True.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and not 0 <= value <= 1:
                raise ConfigError(f"Sampling.{name}: expected a number from 0 to 1, came {value!r}.")
        if not isinstance(self.top_k, Tensor) and (not isinstance(self.top_k, int) or self.top_k < 0):
            raise ConfigError(f"Sampling.top_k: expected a whole number of at least 0, came {self.top_k!r}.")

    @classmethod
    def of(cls, config: "GenerationConfig") -> Self:
        """What the GenerationConfig of a call of ``generate`` asks for (transformers 5.17; None is off).

        Raises:
            ConfigError: it asks for more, see `unsupported`.
        """
        if missing := cls.unsupported(config):
            raise ConfigError(
                f"Sampling: expected a GenerationConfig without {', '.join(missing)}. Apply transformers' own logits "
                "processors to the logits between two graphs."
            )
        names = ["repetition_penalty"] + ["temperature", "top_k", "top_p", "min_p"] * bool(config.do_sample)
        given = {name: getattr(config, name) for name in names}
        return cls(greedy=not config.do_sample, **{name: x for name, x in given.items() if x is not None})

    @staticmethod
    def unsupported(config: "GenerationConfig") -> tuple[str, ...]:
        """Fields of a GenerationConfig that ask for what `Sampling` does not do, so that `of` would raise."""
        absent = ABSENT | (ABSENT_FROM_SAMPLING if config.do_sample else {})
        return tuple(name for name, off in absent.items() if getattr(config, name) not in off)

    def target(self, logits: Tensor, history: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """What ``dsa::mtp_verify`` takes of these logits: probabilities, or logits if ``greedy``.

        Args:
            logits: [B, T, vocab] of T rows of each sequence.
            history: int64[B, S], tokens of ``[0, vocab)`` of which row t has ``lengths[b, t]`` behind it: drafts that
                it follows are among them. transformers counts padding as well. Needed for a repetition penalty
                without ``seen``.
            lengths: int64[B, T].

        Returns:
            [B, T, vocab] in float32, float64 where logits are.

        Raises:
            InputError: there is a repetition penalty and neither a history nor ``seen``.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.penalises:
            seen = self._seen(scores.shape[-1], history, lengths)
            penalty = _per_row(self.repetition_penalty)
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if self.greedy:
            return scores
        if isinstance(self.temperature, Tensor) or self.temperature != 1:
            scores = scores / _per_row(self.temperature)
        if isinstance(self.top_k, Tensor) or self.top_k:
            scores = _keep_best(scores, self.top_k)
        if isinstance(self.top_p, Tensor) or self.top_p < 1:
            scores = _keep_nucleus(scores, _per_row(self.top_p))
        if isinstance(self.min_p, Tensor) or self.min_p:
            probs = scores.softmax(-1)
            scores = _drop(scores, probs < _per_row(self.min_p) * probs.amax(-1, keepdim=True))
        return scores.softmax(-1)

    @property
    def penalises(self) -> bool:
        """Whether tokens of the history count."""
        return isinstance(self.repetition_penalty, Tensor) or self.repetition_penalty != 1

    def _seen(self, vocab: int, history: Tensor | None, lengths: Tensor | None) -> Tensor:
        """bool[B, T or 1, vocab]: a token counts for a row if the first place that holds it lies before its end."""
        if self.seen is not None:
            return self.seen[:, None]
        if history is None or lengths is None:
            raise InputError(
                "Sampling.target: expected history and lengths for repetition_penalty, came None. Give the tokens that "
                "precede each row, or Sampling(seen=...)."
            )
        B, S = history.shape
        places = torch.arange(S, device=history.device).expand(B, S)
        first = history.new_full((B, vocab), S).scatter_reduce(1, history, places, "amin")
        return first[:, None] < lengths[..., None]


def _per_row(value: float | Tensor) -> float | Tensor:
    return value[:, None, None] if isinstance(value, Tensor) else value


def _drop(scores: Tensor, dropped: Tensor) -> Tensor:
    return scores.masked_fill(dropped, float("-inf"))


def _keep_best(scores: Tensor, top_k: int | Tensor) -> Tensor:
    vocab = scores.shape[-1]
    if isinstance(top_k, Tensor):
        last = torch.where(top_k > 0, top_k, vocab).clamp_max(vocab)[:, None, None] - 1
        bar = scores.sort(-1, descending=True).values.gather(-1, last.expand(-1, scores.shape[1], 1))
    else:
        bar = scores.topk(min(top_k, vocab)).values[..., -1:]
    return _drop(scores, scores < bar)


def _keep_nucleus(scores: Tensor, top_p: float | Tensor) -> Tensor:
    ascending, order = scores.sort(-1)
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return _drop(scores, dropped.scatter(-1, order, dropped))
