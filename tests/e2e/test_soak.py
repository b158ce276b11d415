"""Calls of `generate` of all sizes one after another: tokens of single calls, no new graphs, no more memory."""

import gc
import os
import random
import time
from pathlib import Path

import pytest
import torch
from cases import TOPK, optimized, token_ids, with_positions
from mtp import LAYERS, prepared
from transformers import RepetitionPenaltyLogitsProcessor

from dsa_compile.compiled import Compiled
from dsa_compile.replay import Decoder

SECONDS = float(os.environ.get("DSA_SOAK_SECONDS", "20"))
V32 = "deepseek_v32"
PROCESSED = ({}, {"repetition_penalty": 1.3})
TIE = 1e-3
"""Logits that are nearer each other are in either order."""


class Soak:
    """Calls on a model of so many sequences and tokens at most; ``plain``: an uncompiled one that knows ties."""

    def __init__(self, model, plain, device, rows, tokens):
        self.model, self.plain, self.device, self.draw = model, plain, device, random.Random(0)
        self.rows, self.tokens = rows, tokens

    def generate(self, prompts, mask, new, processed):
        arguments = {"do_sample": False, "eos_token_id": 7, "pad_token_id": 0, "max_new_tokens": new, **processed}
        return self.model.generate(prompts, attention_mask=mask, **arguments)[:, prompts.shape[1] :]

    def warm_up(self):
        for processed in PROCESSED:
            for rows in range(1, self.rows + 1):
                prompts = token_ids(rows, self.tokens - 20, self.device)
                self.generate(prompts, torch.ones_like(prompts), 20, processed)

    def call(self, seed):
        """One batch of random sizes, and one of its sequences alone."""
        rows, new = self.draw.randint(1, self.rows), self.draw.randint(1, 40)
        longest = self.draw.randint(TOPK, self.tokens - 40)
        lengths = [longest, *(self.draw.randint(2, longest) for _ in range(rows - 1))]
        mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long().to(self.device)
        prompts, processed = token_ids(rows, longest, self.device, seed) * mask, self.draw.choice(PROCESSED)
        row = self.draw.randrange(rows)
        together = self.generate(prompts, mask, new, processed)[row]
        prompt = prompts[row : row + 1, longest - lengths[row] :]
        if processed and lengths[row] < longest:
            return  # padding counts as seen
        alone = self.generate(prompt, torch.ones_like(prompt), new, processed)[0]
        self.assert_same(prompt[0], together, alone, processed)

    def assert_same(self, prompt, together, alone, processed):
        """Up to the first place where two tokens are as likely, behind which one may end before the other."""
        shared = min(len(together), len(alone))
        differ = (together[:shared] != alone[:shared]).nonzero()
        assert len(differ) or shared == len(alone)
        if len(differ):
            place = int(differ[0])
            before = torch.cat([prompt, alone[:place]])[None]
            with torch.no_grad():
                logits = self.plain(before, **with_positions(torch.ones_like(before))).logits[:, -1]
            scores = RepetitionPenaltyLogitsProcessor(processed.get("repetition_penalty", 1.0))(before, logits)[0]
            assert abs(scores[together[place]] - scores[alone[place]]) < TIE

    def run(self, seconds):
        """How many calls went through."""
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            self.call(count)
            count += 1
        return count


def allocated_bytes():
    gc.collect()
    return torch.cuda.memory_allocated()


def host_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


MEMORY = allocated_bytes, torch.cuda.memory_reserved, host_bytes


def test_calls_one_after_another_are_like_single_ones(monkeypatch, device):
    """Uncompiled: the caches and steps of the first calls serve all."""
    init, made = Decoder.__init__, []
    monkeypatch.setattr(Decoder, "__init__", lambda *args, recorded: (made.append(1), init(*args, recorded=False))[1])
    monkeypatch.setattr(Compiled, "replays", True)
    soak = Soak(prepared(V32, device), prepared(V32, device), device, rows=4, tokens=64)
    soak.warm_up()
    assert len(made) == len(PROCESSED) * len({1, 2, 4})
    for seed in range(6):
        soak.call(seed)
    assert len(made) == len(PROCESSED) * len({1, 2, 4})


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="watches the memory of a GPU")
def test_memory_and_graphs_stay(graphs, device):
    """For DSA_SOAK_SECONDS."""
    model = optimized(V32, device, lowering="inductor", layers=LAYERS)
    model.set_experts_implementation("batched_mm")
    soak = Soak(model, prepared(V32, device), device, rows=4, tokens=256)
    soak.warm_up()
    soak.run(SECONDS / 10)
    warm, recorded = len(graphs), model.recordings()
    before = [measure() for measure in MEMORY]
    calls = soak.run(SECONDS)
    print(f"{calls} calls in {SECONDS:.0f} s, {warm} graphs, {len(recorded)} recordings")
    assert len(graphs) == warm
    assert model.recordings() == recorded
    allocated, reserved, host = [measure() - was for measure, was in zip(MEMORY, before)]
    print(f"more bytes: {allocated:,} allocated, {reserved:,} reserved, {host:,} on the host")
    assert allocated == 0
    assert max(reserved, host) < 32 << 20
