"""The ways to run a model that ``dsa-compile bench model`` compares."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, MaxLengthCriteria, StaticCache, StoppingCriteriaList

from dsa_compile.api import optimize
from dsa_compile.bench.floor import floor_us, weight_bytes
from dsa_compile.bench.kernels import by_group, kernel_times
from dsa_compile.bench.plan_slice import fill
from dsa_compile.bench.timing import REPLAYS, WARM_UP, Gpu, Recording
from dsa_compile.config import CacheConfig
from dsa_compile.decode import run
from dsa_compile.progress import Progress
from dsa_compile.replay import Decoder, Landing
from dsa_compile.sampling import Sampling

RUNS = 3
TIMED_TOKENS = 64
SPARE = max(2 * (WARM_UP + REPLAYS), 2 * TIMED_TOKENS)
"""Slots that decoding may fill while it is timed."""
Found = dict[str, Any]
"""Figures: ``us`` of a step or a prompt, and what else a way can say."""
ERRORS = (ImportError, RuntimeError, TypeError, ValueError, AssertionError)
"""What stock transformers, or Inductor on its code, may end with."""


class Ours:
    """An optimized model. Index keys are in fp8, as DeepSeek-V3.2's own are."""

    name = "dsa_compile"

    def __init__(self, model: Any, gpu: Gpu, batch: int, longest: int) -> None:
        optimize(model, cache=CacheConfig(index_dtype="fp8"))
        self._model, self._gpu, self._batch, self._compile_s = model, gpu, batch, 0.0
        self._cache = model.make_cache(batch, longest + SPARE)
        self._gbytes: float | None = None

    def compile(self, decodes: bool, tokens: int) -> None:
        """What is compiled now need not be while others wait for their turn on the GPU."""
        fill(self._cache)
        start = time.perf_counter()
        if decodes:
            self._decoder()
        else:
            self._gpu.seconds(lambda: self._prompt(self._ids(tokens)))
        self._compile_s = time.perf_counter() - start

    def decode(self, tokens: int) -> Found:
        """A step over so many cached tokens, the last one included, and what it takes at least."""
        gpu, decoder, gbytes = self._gpu, self._decoder(), self._bandwidth()
        self._start(decoder, tokens)
        us = gpu.time(Recording([()], decoder.launch)).median
        parts = by_group(kernel_times(decoder.launch))
        read = weight_bytes(self._model, self._batch)
        floor = floor_us(read, gbytes, parts)
        found = {"us": us, "parts": parts, "floor_us": floor, "graph_bytes": decoder.bytes}
        return found | self._loop(decoder, tokens) | {"compile_s": self._compile_s}

    def _bandwidth(self) -> float:
        """GB/s, measured in the first turn."""
        if self._gbytes is None:
            self._gbytes = self._gpu.ceilings(fp8=False).gbytes
            self._gpu.release()
        return self._gbytes

    def _decoder(self) -> Decoder:
        made: Decoder = self._model.dsa_guard.compiled.decoder(self._cache, Sampling(greedy=True))
        return made

    def _start(self, decoder: Decoder, tokens: int) -> None:
        last, behind = self._ids(1), torch.full((self._batch,), tokens - 1, device=self._gpu.device)
        decoder.start(last, behind, behind, last)

    def _ids(self, tokens: int) -> Tensor:
        return random_ids(self._model, self._batch, tokens)

    def _loop(self, decoder: Decoder, tokens: int) -> Found:
        """``generate_us`` of a token in the loop of `generate`; ``host_us``: what the host does for it."""
        gpu = self._gpu

        def generate() -> None:
            self._start(decoder, tokens)
            run(decoder, self._progress())

        each = median(gpu.seconds(generate) for _ in range(RUNS)) / (TIMED_TOKENS - 1)
        self._start(decoder, tokens)
        progress, landed, host = self._progress(), list[Landing](), list[float]()
        for _ in range(TIMED_TOKENS - 1):
            started = gpu.host_seconds(lambda: landed.append(decoder.advance()))
            host.append(started + gpu.host_seconds(lambda: progress.take(landed[-1].wait())))
        return {"generate_us": each * 1e6, "host_us": median(host) * 1e6}

    def _progress(self) -> Progress:
        """Of sequences that have the first of `TIMED_TOKENS`."""
        config, ids = GenerationConfig(), self._ids(1)
        config._pad_token_tensor = None
        made = Progress(ids, StoppingCriteriaList([MaxLengthCriteria(1 + TIMED_TOKENS)]), config, None)
        made.take(ids.tolist())
        return made

    def prefill(self, tokens: int) -> Found:
        """A prompt, of which the last logits are asked for."""
        ids = self._ids(tokens)
        found = timed(self._gpu, self._prompt, ids) | {"compile_s": self._compile_s}
        return found | {"parts": by_group(kernel_times(lambda: self._prompt(ids)))}

    def _prompt(self, ids: Tensor) -> tuple[Tensor]:
        if held := self._cache.get_seq_length():
            self._cache.crop(-held)
        return (self._model(ids, past_key_values=self._cache, logits_to_keep=1).logits,)


class Theirs:
    """A stock model, with its masks and its cache of expanded keys and values."""

    name = "transformers, eager"

    def __init__(self, model: Any, gpu: Gpu, batch: int, longest: int) -> None:
        self._model, self._gpu, self._batch = model, gpu, batch

    def compile(self, decodes: bool, tokens: int) -> None:
        """Nothing: each number of tokens is a graph of its own, if any."""

    def decode(self, tokens: int) -> Found:
        step, ids = self._step(tokens)
        step(ids)
        return {"us": median(self._gpu.seconds(lambda: step(ids)) for _ in range(10 * RUNS)) * 1e6}

    def _step(self, tokens: int) -> tuple[Callable[[Tensor], tuple[Tensor]], Tensor]:
        """A step over a full static cache, which counts its tokens anew each time."""
        ids = random_ids(self._model, self._batch, 1)
        place = torch.full_like(ids, tokens - 1)
        cache: Any = StaticCache(config=self._model.config, max_cache_len=tokens)
        self._model(ids, past_key_values=cache, position_ids=torch.zeros_like(ids))  # allocates
        for layer in cache.layers:
            for pool in (layer.keys, layer.values, layer.indexer_keys):
                pool.normal_()

        def step(ids: Tensor) -> tuple[Tensor]:
            for layer in cache.layers:
                layer.cumulative_length.fill_(tokens - 1)
                layer.indexer_cumulative_length.fill_(tokens - 1)
            return (self._model(ids, past_key_values=cache, position_ids=place).logits,)

        return step, ids

    def prefill(self, tokens: int) -> Found:
        ids = random_ids(self._model, self._batch, tokens)

        def prompt(ids: Tensor) -> tuple[Tensor, ...]:
            cache: Any = DynamicCache(config=self._model.config)
            logits = self._model(ids, past_key_values=cache, logits_to_keep=1).logits
            pools = [pool for layer in cache.layers for pool in (layer.keys, layer.values, layer.indexer_keys)]
            return (logits, *pools)

        return timed(self._gpu, prompt, ids)


class TheirsCompiled(Theirs):
    """The same, whose step is one graph of Inductor in one CUDA graph; a prompt runs eagerly, as in `generate`."""

    name = "transformers, compiled"

    def decode(self, tokens: int) -> Found:
        torch._dynamo.reset()
        step, ids = self._step(tokens)
        self._model.compile(fullgraph=True)
        start = time.perf_counter()
        recording = self._gpu.record(step, [(ids,)])
        return {"us": self._gpu.time(recording).median, "compile_s": time.perf_counter() - start}


WAYS = {way.name: way for way in (Ours, Theirs, TheirsCompiled)}


def random_ids(model: Any, batch: int, tokens: int) -> Tensor:
    """int64[B, T], the same each time; equal tokens would go to the same experts."""
    generator = torch.Generator(model.device).manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, tokens), device=model.device, generator=generator)


def timed(gpu: Gpu, prompt: Callable[[Tensor], tuple[Tensor, ...]], ids: Tensor) -> Found:
    """Time of a prompt, and what it allocates beside what it returns."""
    prompt(ids)
    extra = gpu.extra_bytes(prompt, (ids,))
    return {"us": median(gpu.seconds(lambda: prompt(ids)) for _ in range(RUNS)) * 1e6, "extra_bytes": extra}
