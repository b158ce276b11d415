"""What fits on a GPU, which is another question than what is fast: a selection reads less and stores no less."""

from dataclasses import dataclass

USABLE = 0.9
"""Share of a GPU's memory that weights, caches and a prompt may fill; the rest is graphs' and the driver's."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """``memory`` of a GPU, ``weights`` on it, ``token``, what a cached token takes in all layers: bytes.

    ``workspace``: what a prompt takes while it runs.
    """

    memory: float
    weights: float
    token: int
    workspace: float = 0

    @property
    def tokens(self) -> int:
        """That fit beside the weights, of all sequences together."""
        return max(0, int((self.memory * USABLE - self.weights - self.workspace) // self.token))

    def fits(self, context: int, batch: int) -> bool:
        """Whether ``batch`` sequences of ``context`` tokens do."""
        return context * batch <= self.tokens

    def largest_batch(self, context: int) -> int:
        return self.tokens // context

    def longest_context(self, batch: int) -> int:
        return self.tokens // batch
