"""An evaluation as pictures."""

from pathlib import Path

from dsa_compile.curve import check_matplotlib
from dsa_compile.evaluation import Evaluation

MASS, NEEDLES = "mass.png", "needles.png"


def draw(found: Evaluation, folder: Path) -> None:
    """Attention kept by layer as `MASS`, and where questions were asked, recall by depth and length as `NEEDLES`.

    Raises:
        ConfigError: there is no matplotlib.
    """
    check_matplotlib(MASS)
    _draw_mass(found, folder / MASS)
    if found.questions:
        _draw_needles(found, folder / NEEDLES)


def _draw_mass(found: Evaluation, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, run in found.runs.items():
        if name != "dense":
            (line,) = axes.plot(run.mass, marker="o", label=found.title(name))
            best = [float("nan") if mass is None else mass for mass in run.exact]
            axes.plot(best, ":", color=line.get_color(), label=f"{found.title(name)}: exact selection")
    axes.set(xlabel="layer", ylabel="attention kept", title=f"K = {found.subject['index_topk']}", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right")
    figure.savefig(path)


def _draw_needles(found: Evaluation, path: Path) -> None:
    from matplotlib.figure import Figure

    kinds = [*dict.fromkeys(question.kind for question in found.questions)]
    lengths, depths = (
        sorted({getattr(question, axis) for question in found.questions}) for axis in ("length", "depth")
    )
    shape = len(found.runs), len(kinds)
    figure = Figure(figsize=(1 + 3 * shape[1], 1 + 2.2 * shape[0]), layout="constrained")
    panels = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    for row, name in zip(panels, found.runs):
        for axes, kind in zip(row, kinds):
            told = [[found.recalled(name, kind=kind, length=n, depth=depth) for n in lengths] for depth in depths]
            axes.imshow([[right / asked for right, asked in cells] for cells in told], vmin=0, vmax=1, aspect="auto")
            for y, cells in enumerate(told):
                for x, (right, asked) in enumerate(cells):
                    color = "black" if 2 * right > asked else "white"
                    axes.text(x, y, f"{right} of {asked}", ha="center", va="center", color=color)
            axes.set(title=f"{found.title(name)}, {kind}")
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    figure.supxlabel("tokens")
    figure.supylabel("depth of the code")
    figure.savefig(path)
