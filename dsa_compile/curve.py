"""The curve of a plan search as a picture."""

from importlib.util import find_spec
from pathlib import Path

from dsa_compile.errors import ConfigError
from dsa_compile.search import PlanSearch


def check_matplotlib(picture: str = "curve.png") -> None:
    """Raise ConfigError where there is no matplotlib for ``picture``."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{picture}: expected matplotlib to draw it, found none. pip install 'dsa_compile[plot]'.")


def draw(search: PlanSearch, path: Path) -> None:
    """Loss against the share of the layers that run their indexer, as a PNG file.

    Raises:
        ConfigError: there is no matplotlib.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([point.retention for point in search.curve], [point.loss for point in search.curve], marker="o")
    for label, loss, style in (("every layer its own", search.own, "--"), ("dense", search.dense, ":")):
        axes.axhline(loss, label=label, linestyle=style, color="gray")
    axes.set(
        xlabel="layers that run their indexer",
        ylabel=f"loss past K = {search.subject['index_topk']}",
        title=search.plan,
    )
    axes.xaxis.set_inverted(True)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.legend()
    figure.savefig(path)
