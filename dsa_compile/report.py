"""What the passes did to a graph: matched and skipped places with reasons, op counts before and after."""

import logging
from collections import Counter, deque
from dataclasses import dataclass, field

log = logging.getLogger("dsa_compile")
"""Its DEBUG level prints numbered graphs: ``TORCH_LOGS="+dsa_compile"``."""


@dataclass(frozen=True)
class Entry:
    """One place that a pass looked at. ``reason`` says why a skipped one was left, or what a matched one became."""

    pass_name: str
    where: str
    matched: bool
    reason: str
    node: str = ""


@dataclass
class Report:
    """What happened to one captured graph, in the order of the pipeline.

    ``bodies``: parts that it was compiled in, those that do the same counted once.
    """

    entries: list[Entry] = field(default_factory=list)
    op_counts: dict[str, tuple[Counter[str], Counter[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    bodies: int = 1

    def matched(self, pass_name: str, where: str, reason: str, node: object = "") -> None:
        self.entries.append(Entry(pass_name, where, True, reason, str(node)))

    def skipped(self, pass_name: str, where: str, reason: str, node: object = "") -> None:
        self.entries.append(Entry(pass_name, where, False, reason, str(node)))

    def of(self, pass_name: str, *, matched: bool | None = None) -> list[Entry]:
        """Entries of one pass; ``matched`` keeps one kind."""
        return [e for e in self.entries if e.pass_name == pass_name and matched in (None, e.matched)]

    def op_changes(self, pass_name: str) -> dict[str, int]:
        """Operators whose count a pass changed, with the difference."""
        before, after = self.op_counts.get(pass_name, (Counter(), Counter()))
        return {op: after[op] - before[op] for op in sorted({*before, *after}) if after[op] != before[op]}


_RECENT: deque[Report] = deque(maxlen=64)


def record(report: Report) -> None:
    """Keep a report for `recent_reports`."""
    _RECENT.append(report)


def recent_reports() -> list[Report]:
    """Reports of the graphs compiled last in this process, oldest first."""
    return list(_RECENT)
