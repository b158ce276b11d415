"""``dsa-compile bench page``: figures of ``bench model`` as a page with a picture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsa_compile.bench.kernels import GROUPS, REST
from dsa_compile.bench.model import DECODE, LAYER, PREFILL, tables
from dsa_compile.bench.model_sizes import title
from dsa_compile.curve import check_matplotlib
from dsa_compile.errors import ConfigError

Rows = Sequence[dict[str, Any]]
TITLES = {
    DECODE: "Decode: milliseconds of a step",
    PREFILL: "Prompts: milliseconds until the first token",
    LAYER: "One attention layer: milliseconds of a prompt",
}


def page(figures: Path, out: Path) -> None:
    """Write a Markdown page ``out`` of what ``bench model --out`` left, and beside it a PNG of where the time goes.

    Raises:
        ConfigError: the file holds no such figures, or there is no matplotlib.
    """
    try:
        found = json.loads(figures.read_text())
        device, version, rows = (found[name] for name in ("device", "torch", "rows"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"bench page: expected a file that 'dsa-compile bench model --out' wrote, came {figures} ({error!r})."
        ) from error
    picture = out.with_suffix(".png")
    draw(rows, picture)
    out.write_text(
        "\n".join(
            [
                "# Speed of whole models",
                "",
                f"Made by `dsa-compile bench page {figures.name} --out {out.name}` of `dsa-compile bench model` on "
                f"{device}, torch {version}; random weights in bfloat16. Times of stock transformers are followed by "
                "how many times as long they are. The columns behind those are of dsa_compile alone: a step's floor is "
                "its weights read once, at the bandwidth that the device was measured to have, and its attention and "
                "indexers as fast as their kernels were in it; `generate` is a token in its loop, of which the host "
                "works for so long; then milliseconds by kind of kernel, and of none.",
                *(line for name in dict.fromkeys(row["model"] for row in rows) for line in sections(name, rows)),
                "",
                "## Where the time goes",
                "",
                f"![share of each kind of kernel]({picture.name})",
                "",
            ]
        )
    )


def sections(name: str, rows: Rows) -> list[str]:
    """The tables of a model, each with its heading."""
    lines = ["", f"## {name}", "", f"{title(name)}."]
    for what, heading in TITLES.items():
        found = tables([row for row in rows if (row["model"], row["what"]) == (name, what)])
        lines += ["", f"### {heading}"] * bool(found)
        for cells in found:
            marks = ["---"] * len(cells[0])
            lines += ["", *(f"| {' | '.join(line)} |" for line in (cells[0], marks, *cells[1:]))]
    return lines


def draw(rows: Rows, path: Path) -> None:
    """A stacked bar for each of our measurements that was profiled, as shares of its kernels' time."""
    check_matplotlib(path.name)
    from matplotlib.figure import Figure

    profiled = [row for row in rows if row.get("parts") and sum(row["parts"].values()) > 0]
    figure = Figure(figsize=(9, 1.5 + 0.32 * len(profiled)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{r['model']}: {r['what']}, {r['batch']} x {r['tokens'] / 1024:g}K" for r in profiled]
    left = [0.0] * len(profiled)
    for group in (*GROUPS, REST):
        shares = [row["parts"][group] / sum(row["parts"].values()) for row in profiled]
        axes.barh(labels, shares, left=left, label=group)
        left = [a + b for a, b in zip(left, shares)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the time of kernels")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
    figure.savefig(path)
