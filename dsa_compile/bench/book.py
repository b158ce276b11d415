"""``dsa-compile bench book``: figures of kernels into the tables of a lab book, which keeps what they do not say."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from dsa_compile.bench.table import Row
from dsa_compile.errors import ConfigError

Found = dict[tuple[str, str, str | None], Row]
"""Rows of figures by the title of their benchmark, case and peer."""
MARK = re.compile(r"<!-- bench: (.+), (us|tflops) -->")
"""The line above a table: which benchmark's, and the figure that its cells show."""
OURS = "ours"


def book(figures: Sequence[Path], page: Path) -> int:
    """Write what ``bench attention``, ``indexer``, ``topk`` and ``select`` left by ``--out`` into a Markdown page.

    A table follows a line of `MARK`. Its first column names cases; a cell under "ours" or under a peer's name becomes
    the figure of that case, bold where a case reaches its targets. All other cells stay.

    Returns:
        How many cells were filled.

    Raises:
        ConfigError: a file holds no such figures, or no table of the page has a place for any of them.
    """
    found = {key: row for path in figures for key, row in _read(path).items()}
    lines, cells = page.read_text().split("\n"), 0
    for i, line in enumerate(lines):
        if mark := MARK.fullmatch(line):
            cells += _fill(lines, i + 1, mark[1], mark[2], found)
    if not cells:
        raise ConfigError(
            f"bench book: expected a table of {page} under '<!-- bench: TITLE, us -->' or 'tflops' with a title and a "
            f"case of {', '.join(map(str, figures))}, found none."
        )
    page.write_text("\n".join(lines))
    return cells


def _read(path: Path) -> Found:
    try:
        figures = json.loads(path.read_text())
        return {(figures["title"], row["case"], row["peer"]): row for row in figures["cases"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"bench book: expected a file that a benchmark of kernels wrote by --out, came {path} ({error!r})."
        ) from error


def _fill(lines: list[str], start: int, title: str, unit: str, found: Found) -> int:
    """Fill the table whose heads stand in line ``start``; how many cells that were."""
    heads, filled = _cells(lines[start]), 0
    for i in range(start + 2, len(lines)):
        if not lines[i].startswith("|"):
            break
        case, *cells = _cells(lines[i])
        for column, head in enumerate(heads[1:]):
            row = found.get((title, case.strip("`"), None if head == OURS else head))
            if row is not None:
                cells[column] = _cell(row, unit)
                filled += 1
        lines[i] = f"| {' | '.join([case, *cells])} |"
    return filled


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _cell(row: Row, unit: str) -> str:
    """A figure with a decimal below 200 us."""
    if unit not in row:
        return "refused" if "refused" in row else "wrong"
    text = f"{row[unit]:,.{int(unit == 'us' and row[unit] < 200)}f}"
    return f"**{text}**" if row.get("met") else text
