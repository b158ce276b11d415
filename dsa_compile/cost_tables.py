"""The cost model of one kind of model on one GPU, as tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table

from dsa_compile import cost
from dsa_compile.cost.devices import Device, device_named
from dsa_compile.cost.sharing import hiding_ceiling, overlap_ceiling, sharing_speedup
from dsa_compile.cost.speculation import ACCEPTANCE, Served, break_even_acceptance, tokens_per_second


@dataclass(frozen=True, kw_only=True)
class CostTables:
    """What dense and sparse attention cost at these contexts, and what drafts gain at these requests a GPU.

    Latents are in bfloat16 and index keys in fp8, weights in fp8, the language-model head in bfloat16.
    """

    name: str
    model: Served
    gpu: str
    index_topk: int
    contexts: Sequence[int]
    batches: Sequence[int]

    @property
    def device(self) -> Device:
        """Raises ConfigError for an unknown GPU."""
        return device_named(self.gpu)

    def decode(self, context: int) -> tuple[cost.Cost, cost.Cost]:
        """A decode step in a layer, dense and sparse; up to K sparse is dense."""
        dims, topk = self.model.attention, self._topk(context)
        sparse = cost.decode_cost(dims, context, topk, index_key_bytes=self.model.index_key_bytes())
        return cost.decode_cost(dims, context), sparse

    def prompt(self, tokens: int) -> tuple[int, int]:
        """FLOPs of a prompt in a layer, dense and sparse; up to K sparse is dense."""
        dims = self.model.attention
        return cost.prefill_flops(dims, tokens), cost.prefill_flops(dims, tokens, self._topk(tokens))

    def indexer_share(self, context: int) -> float:
        """Of the bytes that sparse attention reads for a decode step; 0 up to K."""
        read = context * self.model.index_key_bytes() if self._topk(context) else 0
        return read / self.decode(context)[1].bytes

    def _topk(self, context: int) -> int | None:
        return self.index_topk if context > self.index_topk else None

    def gains(self, context: int, batch: int, index_topk: int | None) -> list[float]:
        """Tokens a second with 1, 2, ... drafts for each one without."""
        base, *drafted = (
            tokens_per_second(self.model, self.device, batch, context, ACCEPTANCE[:drafts], index_topk=index_topk)
            for drafts in range(len(ACCEPTANCE) + 1)
        )
        return [rate / base for rate in drafted]

    def _cached(self) -> tuple[int, int]:
        """Bytes of a token in a layer: its latent row, its index key."""
        return cost.cached_bytes(self.model.attention, index_key_bytes=0), self.model.index_key_bytes()

    def __rich__(self) -> Group:
        return Group(self._attention_table(), self._plan_table(), self._draft_table())

    def _attention_table(self) -> Table:
        dims = self.model.attention
        even = cost.break_even(dims, self.index_topk, index_key_bytes=self.model.index_key_bytes())
        table = Table(
            title=f"{self.name}: one layer, dense -> sparse with K = {self.index_topk}",
            caption=f"tokens from which sparse pays: {_tokens(even.flops)} in decode FLOPs, {_tokens(even.bytes)} in "
            f"bytes read, {_tokens(even.prefill)} in prompt FLOPs",
        )
        for name in ("context", "decode GFLOP", "", "decode MiB read", "", "prefill TFLOP", "", "MiB cached"):
            table.add_column(name, justify="right")
        row, key = self._cached()
        for context in self.contexts:
            (dense, sparse), prompt = self.decode(context), self.prompt(context)
            table.add_row(
                f"{context:,}",
                *_change(dense.flops / 1e9, sparse.flops / 1e9),
                *_change(dense.bytes / 2**20, sparse.bytes / 2**20),
                *_change(*(flops / 1e12 for flops in prompt)),
                _change(row * context / 2**20, (row + key) * context / 2**20)[0],
            )
        return table

    def _plan_table(self) -> Table:
        table = Table(
            title=f"{self.name}: what plans gain on sparse attention bound by its reads",
            caption="at most: without indexers; beside attention: each beside one layer's attention",
        )
        retentions = (2, 4, 8)
        for name in ("context", "indexer", *(f"share:1/{r}" for r in retentions), "at most", "beside attention"):
            table.add_column(name, justify="right")
        for context in self.contexts:
            share = self.indexer_share(context)
            gains = [sharing_speedup(share, 1 / r) for r in retentions]
            gains += [hiding_ceiling(share), overlap_ceiling(share, 1 - share)]
            table.add_row(f"{context:,}", f"{share:.1%}", *(f"{gain:.2f}x" for gain in gains))
        return table

    def _draft_table(self) -> Table:
        accepted = ", ".join(f"{rate:.0%}" for rate in ACCEPTANCE)
        table = Table(
            title=f"{self.name} on {self.gpu}: tokens a second of a GPU, and what drafts gain",
            caption=f"assumed: drafts accepted {accepted}; {self.model.local_experts} experts on a GPU",
        )
        drafts = [f"{n} draft{'s' * (n > 1)}" for n in range(1, len(ACCEPTANCE) + 1)]
        for name in ("context", "requests", "cache GB", "attention", "tokens/s", *drafts, "1 draft pays from"):
            table.add_column(name, justify="right")
        row, key = self._cached()
        for context in self.contexts:
            for batch in self.batches:
                for name, topk, token in (("dense", None, row), ("sparse", self.index_topk, row + key)):
                    rate = tokens_per_second(self.model, self.device, batch, context, index_topk=topk)
                    needed = break_even_acceptance(self.model, self.device, batch, context, index_topk=topk)
                    table.add_row(
                        f"{context:,}",
                        str(batch),
                        f"{self.model.layers * token * context * batch / 1e9:,.1f}",
                        name,
                        f"{rate:,.0f}",
                        *(f"{gain:.2f}x" for gain in self.gains(context, batch, topk)),
                        f"{needed:.0%} accepted" if needed <= 1 else "never",
                    )
        return table


def _change(dense: float, sparse: float) -> tuple[str, str]:
    return f"{dense:,.2f} -> {sparse:,.2f}", f"{dense / sparse:.2f}x"


def _tokens(tokens: float) -> str:
    return "never" if math.isinf(tokens) else f"{math.ceil(tokens):,}"
