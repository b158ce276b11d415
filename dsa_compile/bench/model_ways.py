"""The ways to run a model that ``dsa-compile bench model`` compares."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from dsa_compile.api import optimize
from dsa_compile.bench.kernels import by_group, kernel_times
from dsa_compile.bench.plan_slice import fill, held
from dsa_compile.bench.timing import REPLAYS, WARM_UP, Gpu, Recording
from dsa_compile.config import CacheConfig
from dsa_compile.sampling import Sampling

RUNS = 3
TIMED_TOKENS = 64
SPARE = max(2 * (WARM_UP + REPLAYS), 2 * TIMED_TOKENS)
"""Slots that decoding may fill while it is timed."""
Found = dict[str, Any]
"""Figures: ``us`` of a step or a prompt, and what else a way can say."""


class Ours:
    """An optimized model. Index keys are in fp8, as DeepSeek-V3.2's own are."""

    name = "dsa_compile"

    def __init__(self, model: Any, gpu: Gpu, batch: int, longest: int) -> None:
        optimize(model, cache=CacheConfig(index_dtype="fp8"))
        self._model, self._gpu, self._batch, self._longest = model, gpu, batch, longest
        self._cache = model.make_cache(batch, longest + SPARE)

    def decode(self, tokens: int) -> Found:
        """A step over so many cached tokens, the last one included; ``generate_us``: what one costs `generate`."""
        start, cache, gpu = time.perf_counter(), self._cache, self._gpu
        fill(cache)
        decoder = self._model.dsa_guard.decoder(cache, Sampling(greedy=True))
        compiled = time.perf_counter() - start
        last = torch.full((self._batch, 1), 3, device=gpu.device)
        behind = torch.full((self._batch,), tokens - 1, device=gpu.device)
        decoder.start(last, behind, behind, last)
        us = gpu.time(Recording([()], decoder.launch)).median
        parts = by_group(kernel_times(decoder.launch))
        few, many = (self._generate(tokens, n) for n in (TIMED_TOKENS // 4, TIMED_TOKENS))
        each = (many - few) / (TIMED_TOKENS - TIMED_TOKENS // 4) * 1e6
        return {"us": us, "generate_us": each, "parts": parts, "compile_s": compiled, "graph_bytes": decoder.bytes}

    def _generate(self, tokens: int, new: int) -> float:
        """Seconds of `generate`, of whose prompt all but two tokens are in the cache."""
        cache = self._cache
        prompt = torch.full((self._batch, tokens), 3, device=self._gpu.device)
        arguments: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}

        def generate() -> None:
            cache.lengths.valid, cache.lengths.seen, cache.lengths.bound = held(cache, tokens - 2)
            self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, pad_token_id=0, **arguments
            )

        generate()
        return median(self._gpu.seconds(generate) for _ in range(RUNS))

    def prefill(self, tokens: int) -> Found:
        """A prompt, of which the last logits are asked for."""
        ids = torch.full((self._batch, tokens), 3, device=self._gpu.device)

        def prompt(ids: Tensor) -> tuple[Tensor]:
            if held := self._cache.get_seq_length():
                self._cache.crop(-held)
            return (self._model(ids, past_key_values=self._cache, logits_to_keep=1).logits,)

        return timed(self._gpu, prompt, ids) | {"parts": by_group(kernel_times(lambda: prompt(ids)))}


class Theirs:
    """A stock model, with its masks and its cache of expanded keys and values."""

    name = "transformers, eager"

    def __init__(self, model: Any, gpu: Gpu, batch: int, longest: int) -> None:
        self._model, self._gpu, self._batch = model, gpu, batch

    def decode(self, tokens: int) -> Found:
        step, ids = self._step(tokens)
        step(ids)
        return {"us": median(self._gpu.seconds(lambda: step(ids)) for _ in range(10 * RUNS)) * 1e6}

    def _step(self, tokens: int) -> tuple[Callable[[Tensor], tuple[Tensor]], Tensor]:
        """A step over a full static cache, which counts its tokens anew each time."""
        ids = torch.full((self._batch, 1), 3, device=self._gpu.device)
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
        ids = torch.full((self._batch, tokens), 3, device=self._gpu.device)

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


def timed(gpu: Gpu, prompt: Callable[[Tensor], tuple[Tensor, ...]], ids: Tensor) -> Found:
    """Time of a prompt, what it allocates beside what it returns, and how long its first run took to compile."""
    first = gpu.seconds(lambda: prompt(ids))
    extra = gpu.extra_bytes(prompt, (ids,))
    seconds = median(gpu.seconds(lambda: prompt(ids)) for _ in range(RUNS))
    return {"us": seconds * 1e6, "extra_bytes": extra, "compile_s": max(0.0, first - seconds)}
