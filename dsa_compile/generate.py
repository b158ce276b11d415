"""``generate`` of a model with an MTP layer: what transformers' sampling loop gives, several tokens a step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dsa_compile.cache import DSACache
from dsa_compile.errors import CacheCapacityError
from dsa_compile.models.mtp_step import Graphs, Place
from dsa_compile.pace import Pace
from dsa_compile.progress import Progress, is_length_or_eos
from dsa_compile.replay import Landing
from dsa_compile.replay_drafts import DraftDecoder
from dsa_compile.sampling import Sampling
from dsa_compile.steps import Arriving, BetweenGraphs, InGraph, OneByOne, Stepper

NEED_EVERY_STEP = (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
"""Logits processors that keep something from step to step, or know sequences by their place in the batch."""


@dataclass(frozen=True)
class MTPStatistics:
    """What drafting brought in one ``generate``.

    Attributes:
        steps_of: verifications of the batch, by the number of drafts: of none, of one, ...
        tokens: new tokens that the steps gave; the first of each sequence comes from the prompt.
        verified: sequences verified, over all steps; finished ones are not.
        accepted: of these, how many accepted their first draft, their second, ...
        seconds: of the steps, with compilation where one was due.
    """

    steps_of: tuple[int, ...]
    tokens: int
    verified: int
    accepted: tuple[int, ...]
    seconds: float

    @property
    def steps(self) -> int:
        """Verifications of the batch."""
        return sum(self.steps_of)

    @property
    def accept_length(self) -> float:
        """Tokens that a step adds to a sequence on average: the accepted drafts and one more."""
        return 1 + sum(self.accepted) / self.verified if self.verified else float("nan")

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.steps else float("nan")


@dataclass
class GenerateMTPOutput(GenerateDecoderOnlyOutput):
    """What ``generate(return_dict_in_generate=True)`` returns where it drafted."""

    mtp: MTPStatistics | None = None


def sample(
    model: Any,
    graphs: Callable[[int], Graphs],
    drafter: Callable[[DSACache, Sampling], DraftDecoder] | None,
    pace: Pace | None,
    say_once: Callable[[str], None],
    plain: Callable[..., Any],
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Greedy search or sampling with drafts; by ``plain``, transformers' own loop, where there can be none.

    Args:
        model: a prepared model with an MTP layer. graphs: by the width of a step, compiled or not.
        drafter: makes steps that replay over a cache, or finds those that it made; None: none can.
        pace: what says how many tokens to draft, step by step; None: as many as the model is prepared for.
        say_once: where a warning goes.
        input_ids, ...: as ``transformers.GenerationMixin.generate`` prepares them.

    Raises:
        CacheCapacityError: the cache has no room for the drafts behind the longest sequence; nothing was written.
    """
    reason = refusal(logits_processor, stopping_criteria, generation_config, synced_gpus, input_ids.shape[0])
    if reason is not None:
        say_once(f"generate decodes without drafts: {reason}.")
        arguments = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        return plain(input_ids, logits_processor, stopping_criteria, generation_config, **arguments)
    progress = Progress(input_ids, stopping_criteria, generation_config, streamer)
    check_capacity(model, model_kwargs, progress.limit)
    cache, first = first_tokens(model, input_ids, logits_processor, generation_config, model_kwargs)
    landing = Landing(first)
    landing.send(first, len(first))
    # from here on the host works while the device is at the prompt
    sampling = sampling_of(model, logits_processor, generation_config)
    valid, state = cache.lengths.valid, cache.lengths.state
    alive = torch.ones_like(valid, dtype=torch.bool)
    place = Place(valid, alive, model_kwargs["position_ids"][:, -1] + 1 - valid)

    def begin(drafts: int) -> Stepper:
        assert state is not None
        # kept selections need the host to say whose they are; what a row has behind it counts for its penalty
        if drafter and sampling and not sampling.penalises and not any(d.kept_topk for d in cache.dims):
            made = drafter(cache, sampling)
            made.start(first, state, place, progress.limit, drafts)
            return made
        step: InGraph | BetweenGraphs
        if sampling is not None:
            step = InGraph(model, graphs, cache, sampling, progress)
        else:
            names = ", ".join(type(p).__name__ for p in logits_processor)
            say_once(f"generate drafts in two graphs a step, which is slower: for {names} between them.")
            greedy = not generation_config.do_sample
            step = BetweenGraphs(model, graphs, cache, logits_processor, progress, greedy)
        fresh, states = first.repeat(1, drafts + 1), state[:, None].repeat(1, drafts + 1, 1)
        tokens = graphs(drafts + 1).draft(model, cache, fresh, states, torch.ones_like(valid), place)
        return OneByOne(step, tokens, place)

    with model._optimize_model_for_decode():
        statistics = _decode(begin, landing.wait, model.dsa.drafts, pace, cache, progress)
    made = partial(GenerateMTPOutput, past_key_values=cache, mtp=statistics)
    return ended(progress, generation_config, made)


def _decode(
    begin: Callable[[int], Stepper],
    first: Callable[[], list[list[int]]],
    most: int,
    pace: Pace | None,
    cache: DSACache,
    progress: Progress,
) -> MTPStatistics:
    """Steps until every sequence is finished.

    The cache counts their tokens at the end: an interrupted call leaves it as the prompt did. Where the device is a
    step ahead, what it appended to a sequence that turns out to be finished lies behind the sequence's length.

    Args:
        begin: makes steps, of which the first has so many drafts. first: waits for the prompt's tokens.
        most: drafts of a step.
    """
    state: Any = cache.lengths.state  # of the last token in the cache
    verified, steps_of, accepted_at = 0, [0] * (most + 1), [0] * most
    try:
        drafts = pace.drafts() if pace else most
        stepper = begin(drafts) if progress.limit > 1 else None
        progress.take(first())
        start = begun = time.perf_counter()
        if stepper is not None and any(progress.finished):
            stepper.finish(progress.finished)
        ahead: Arriving | None = None
        while stepper is not None and not all(progress.finished):
            arriving = ahead or stepper.advance(drafts)
            ahead = stepper.advance(drafts) if stepper.looks_ahead and progress.outlasts_a_step() else None
            running = [row for row, finished in enumerate(progress.finished) if not finished]
            counts, blocks = zip(*((count, block) for count, *block in arriving.wait()))
            taken = progress.take([block[: count + 1] for count, block in zip(counts, blocks)])
            verified += len(running)
            steps_of[arriving.drafts] += 1
            accepted_at = [n + sum(counts[row] > at for row in running) for at, n in enumerate(accepted_at)]
            if pace is not None:
                pace.note(arriving.drafts, (now := time.perf_counter()) - begun, [counts[row] for row in running])
                begun, drafts = now, pace.drafts()
            if ended := [row for row in running if progress.finished[row]]:
                state = _with_last(state, arriving.states, {row: taken[row] - 1 for row in ended})
                stepper.finish(progress.finished)
    finally:
        cache.lengths.slots = None
    cache.lengths.next_state = state
    new = count_new(cache, progress)
    return MTPStatistics(tuple(steps_of), new, verified, tuple(accepted_at), time.perf_counter() - start)


def _with_last(state: Tensor, states: Tensor, columns: dict[int, int]) -> Tensor:
    """``state`` [B, hidden] with column ``columns[row]`` of states [B, W, hidden] in these rows.

    What says so travels without a wait for the device, which is busy with the next step.
    """
    wanted = [columns.get(row, -1) for row in range(state.shape[0])]
    column = torch.tensor(wanted, pin_memory=state.is_cuda).to(state.device, non_blocking=True)[:, None, None]
    chosen = states.gather(1, column.clamp(min=0).expand(-1, 1, states.shape[2]))
    return torch.where(column[:, 0] >= 0, chosen[:, 0], state)


def first_tokens(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> tuple[DSACache, Tensor]:
    """The cache that holds the prompt, and int64[B, 1], the token behind it."""
    outputs = model._prefill(input_ids, config, model_kwargs)
    scores = logits_processor(input_ids, outputs.logits[:, -1].float())  # type: ignore[arg-type]
    if config.do_sample:
        return outputs.past_key_values, torch.multinomial(scores.softmax(-1), num_samples=1)
    return outputs.past_key_values, scores.argmax(-1, keepdim=True)


def count_new(cache: DSACache, progress: Progress) -> int:
    """Count the new tokens of each sequence but its last, which no cache holds yet; how many they are in all."""
    new = [len(tokens) - 1 for tokens in progress.tokens]
    cache.commit(torch.arange(max(new), device=cache.device) < torch.tensor(new, device=cache.device)[:, None])
    return sum(new)


def ended(progress: Progress, config: GenerationConfig, output: Callable[..., Any]) -> Any:
    """What ``generate`` returns: the sequences, or what ``output`` makes of ``sequences=``."""
    if progress.streamer is not None:
        progress.streamer.end()
    sequences = progress.sequences()
    return output(sequences=sequences) if config.return_dict_in_generate else sequences


def refusal(
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    synced_gpus: bool,
    batch_size: int,
) -> str | None:
    """Why a call is left to transformers' loop, drafts or not, or None."""
    if not config.use_cache:
        return "use_cache=False leaves it no cache"
    if synced_gpus:
        return "synced_gpus wants equally many steps of every rank"
    kept = [n for n in ("scores", "logits", "attentions", "hidden_states") if getattr(config, f"output_{n}")]
    if config.return_dict_in_generate and kept:
        return f"output_{kept[0]} is of single tokens"
    if stopping_criteria.max_length is None:
        return "nothing bounds the length"
    eos = any(isinstance(c, EosTokenCriteria) for c in stopping_criteria)
    if batch_size > 1 and not eos and not all(map(is_length_or_eos, stopping_criteria)):
        return "without an eos token a sequence that has stopped goes on until all have"
    if stateful := [type(p).__name__ for p in logits_processor if isinstance(p, NEED_EVERY_STEP)]:
        return f"{stateful[0]} must see every token of the batch in turn"
    return None


def sampling_of(model: Any, logits_processor: LogitsProcessorList, config: GenerationConfig) -> Sampling | None:
    """What the graph is to do, or None where there are processors that it cannot stand for."""
    if Sampling.unsupported(config):
        return None
    described = model._get_logits_processor(config, device=model.device, model_kwargs={}, input_ids_seq_length=1)
    ours, all_of_them = ([(type(p), vars(p)) for p in each] for each in (described, logits_processor))
    return Sampling.of(config) if ours == all_of_them else None


def check_capacity(model: Any, model_kwargs: dict[str, Any], limit: int) -> None:
    cache = model_kwargs["past_key_values"]
    longest = int(model_kwargs["attention_mask"].sum(1).max()) + limit - 1
    needed = longest + model.dsa.draft_slots
    if isinstance(cache, DSACache) and needed > cache.capacity:
        drafts = f" and drafts take {model.dsa.draft_slots} behind them" if model.dsa.drafts else ""
        raise CacheCapacityError(
            f"DSACache holds {cache.capacity} tokens a sequence, this call may fill {longest}{drafts}; nothing was "
            f"written. Ask for more with model.make_cache(batch_size, capacity={needed}) or "
            f"CacheConfig(capacity={needed})."
        )
