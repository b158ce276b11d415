"""``generate`` without drafts on a GPU: what transformers' sampling loop gives, one replay of a CUDA graph a token."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dsa_compile.cache import DSACache
from dsa_compile.generate import check_capacity, count_new, ended, first_tokens, refusal, sampling_of
from dsa_compile.progress import Progress
from dsa_compile.replay import Decoder, Landing
from dsa_compile.sampling import Sampling


def decode(
    model: Any,
    decoder: Callable[[DSACache, Sampling], Decoder],
    plain: Callable[..., Any],
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Greedy search or sampling by ``decoder``; by ``plain``, transformers' own loop, where a step must show more.

    Args:
        model: a prepared model. decoder: makes steps over a cache, or finds those that it made.
        input_ids, ...: as ``transformers.GenerationMixin.generate`` prepares them.

    Raises:
        CacheCapacityError: the cache has no room for all that may be generated; nothing was written.
    """
    sampling = sampling_of(model, logits_processor, generation_config)
    cache = model_kwargs.get("past_key_values")
    if (
        refusal(logits_processor, stopping_criteria, generation_config, synced_gpus, input_ids.shape[0])
        or sampling is None
        or not isinstance(cache, DSACache)
        or any(d.kept_topk for d in cache.dims)  # kept selections need the host to say whose they are
    ):
        arguments = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        return plain(input_ids, logits_processor, stopping_criteria, generation_config, **arguments)
    progress = Progress(input_ids, stopping_criteria, generation_config, streamer)
    check_capacity(model, model_kwargs, progress.limit)
    cache, first = first_tokens(model, input_ids, logits_processor, generation_config, model_kwargs)
    landing = Landing(first)
    landing.send(first, len(first))
    made = None
    if progress.limit > 1:  # the host works while the device is at the prompt
        made = decoder(cache, sampling)
        made.start(first, cache.lengths.valid, model_kwargs["position_ids"][:, -1] + 1, input_ids)
    progress.take(landing.wait())
    if made is not None and not all(progress.finished):
        if any(progress.finished):
            made.finish(progress.finished)
        run(made, progress)
    count_new(cache, progress)
    return ended(progress, generation_config, partial(GenerateDecoderOnlyOutput, past_key_values=cache))


def run(decoder: Decoder, progress: Progress) -> None:
    """Steps until every sequence is finished.

    The device is a step ahead of the host: what it appended to a sequence that turns out to be finished lies behind the
    sequence's length, where nobody sees it.
    """
    left = progress.limit - max(map(len, progress.tokens))
    ahead = decoder.advance()
    while not all(progress.finished):
        left -= 1
        arriving, finished = ahead, list(progress.finished)
        if left:
            ahead = decoder.advance()
        progress.take(arriving.wait())
        if progress.finished != finished:
            decoder.finish(progress.finished)
