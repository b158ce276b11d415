"""What a sparse model says when it is asked, by the code that users run."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dsa_compile.api import optimize
from dsa_compile.config import DSAConfig
from dsa_compile.haystack import Question
from dsa_compile.replanning import on_same_weights

TOKENS_PER_ANSWER = 8
"""A code of four digits and what stands between it and the next."""


def answered(
    questions: Sequence[Question], model: nn.Module, options: DSAConfig, tokenizer: Any, advance: Callable[[], None]
) -> tuple[bool, ...]:
    """Which questions a model under ``options`` answers, decoding greedily; the model stays as it is.

    Args:
        advance: called behind each question.
    """
    if not questions:
        return ()
    longest = max(question.length + TOKENS_PER_ANSWER * len(question.answers) for question in questions)
    cache = dataclasses.replace(options.cache, capacity=options.cache.capacity or longest)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plan=")  # it is being measured
        sparse = optimize(on_same_weights(model), options, cache=cache, lowering="eager", mode=None, mtp=None)
    done = []
    for question in questions:
        ids = question.prompt[None].to(sparse.device)
        said = sparse.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS_PER_ANSWER * len(question.answers),
            do_sample=False,
        )
        done.append(question.is_answered(tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)))
        advance()
    return tuple(done)
