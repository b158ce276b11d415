"""How many tokens to draft, where the caller leaves it to what pays."""

from collections import deque
from statistics import median

PROBE = 4
"""Timed steps after which a width is known; the first of a width, which may be compiled, is not timed."""

REVIEW = 128
"""Steps between two looks at the widths beside the best one."""

FORGET = 0.98
"""What a step leaves of the acceptance seen before it: the last fifty count."""


class Pace:
    """Measures what widths cost and what drafts bring, and names the number of drafts that gives most tokens a second.

    It starts with one draft, tries its neighbours, goes where it pays, and looks around again every `REVIEW` steps. No
    drafts is a choice as well; what they would bring is then what they last brought.

    Args:
        most: drafts at most.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._seconds: list[deque[float]] = [deque(maxlen=2 * PROBE) for _ in range(most + 1)]
        self._steps = [0] * (most + 1)
        self._reached = [1e-9] * most
        self._accepted = [1e-9] * most
        self._since = 0
        self._best = 1

    def drafts(self) -> int:
        """Of the next step."""
        for near in (self._best, self._best - 1, self._best + 1):
            if 0 <= near <= self.most and len(self._seconds[near]) < PROBE:
                return near
        if self._since >= REVIEW:
            self._since = 0
            for near in {self._best - 1, self._best + 1} & set(range(self.most + 1)):
                self._seconds[near].clear()
        self._best = max(range(self.most + 1), key=self.rate)
        return self._best

    def note(self, drafts: int, seconds: float, accepted: list[int]) -> None:
        """Take account of a step that verified ``drafts`` for each of the sequences that ``accepted`` counts for."""
        self._steps[drafts] += 1
        self._since += 1
        if self._steps[drafts] > 1:
            self._seconds[drafts].append(seconds)
        for place in range(drafts):
            self._reached[place] = FORGET * self._reached[place] + sum(n >= place for n in accepted)
            self._accepted[place] = FORGET * self._accepted[place] + sum(n > place for n in accepted)

    def rate(self, drafts: int) -> float:
        """Tokens a second that a sequence gets with so many drafts; 0 where no such step was timed."""
        if not self._seconds[drafts]:
            return 0.0
        tokens = survives = 1.0
        for place in range(drafts):
            survives *= self._accepted[place] / self._reached[place]
            tokens += survives
        return tokens / median(self._seconds[drafts])
