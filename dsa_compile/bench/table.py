"""The table that a kernel benchmark prints: a column is a function of a row of figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]
"""Figures of ours or of a peer on one case; what is not right has no speed."""


@dataclass(frozen=True)
class Column:
    """``text``: aligned to the left."""

    title: str
    cell: Callable[[Row], str]
    text: bool = False


def figure(title: str, key: str, form: str = "", *, text: bool = False) -> Column:
    """A figure in this format, empty where a row lacks it."""
    return Column(title, lambda row: format(row[key], form) if key in row else "", text)


def table(title: str, caption: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """Why a peer refused stands in the last column."""
    made = Table(title=title, caption=caption)
    for column in columns:
        made.add_column(column.title, justify="left" if column.text else "right")
    for row in rows:
        cells = [column.cell(row) for column in columns]
        if "refused" in row:
            cells[-1] = escape(f"refused: {row['refused']}")
        made.add_row(*cells)
    return made


def _time(row: Row) -> str:
    if "us" in row:
        return f"{row['us']:.1f}"
    return "" if "refused" in row else "[bold red]WRONG[/]"


def _target(row: Row) -> str:
    target: str = row.get("target", "")
    return f"[red]{target}, missed[/]" if target and row["right"] and not row["met"] else target


CASE = Column("case", lambda row: row["case"] if row["peer"] is None else f"  {row['peer']}", text=True)
TIME = Column("time us", _time)
SPREAD = Column("10-90 %", lambda row: f"{row['us_10']:.1f}-{row['us_90']:.1f}" if "us" in row else "")
TFLOPS = figure("TFLOP/s", "tflops", ".0f")
GBYTES = figure("GB/s", "gbytes", ".0f")
SHARE = figure("of ceiling", "share", ".0%")
TARGET = Column("target", _target, text=True)
CONFIGURATION = figure("configuration", "configuration", text=True)


def described(columns: int, keys: int, warps: int, stages: int, splits: int) -> str:
    """A kernel's configuration."""
    return f"{columns} x {keys}, {warps} warps, {stages} stages, {splits} splits"
