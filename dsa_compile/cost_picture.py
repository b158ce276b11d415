"""The cost model as a picture."""

from pathlib import Path

from dsa_compile.cost_tables import CostTables
from dsa_compile.curve import check_matplotlib

CONTEXTS = tuple(1024 << n for n in range(9))
BATCHES = tuple(1 << n for n in range(9))


def draw(tables: CostTables, path: Path) -> None:
    """Gain of sparse attention by context, and of one draft by requests, as a PNG file.

    Raises:
        ConfigError: there is no matplotlib.
    """
    check_matplotlib(path.name)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [tables.decode(context) for context in CONTEXTS]
    prompts = [tables.prompt(context) for context in CONTEXTS]
    left.plot(CONTEXTS, [dense.flops / sparse.flops for dense, sparse in steps], marker="o", label="decode FLOPs")
    left.plot(CONTEXTS, [dense.bytes / sparse.bytes for dense, sparse in steps], marker="o", label="decode bytes read")
    left.plot(CONTEXTS, [dense / sparse for dense, sparse in prompts], marker="o", label="prompt FLOPs")
    left.set(xlabel="context", ylabel="dense / sparse", title=f"{tables.name}: K = {tables.index_topk}", yscale="log")
    for context in tables.contexts:
        for topk, style in ((None, ":"), (tables.index_topk, "-")):
            gains = [tables.gains(context, batch, topk)[0] for batch in BATCHES]
            label = f"{context:,}, {'dense' if topk is None else 'sparse'}"
            right.plot(BATCHES, gains, style, marker=".", label=label)
    right.set(xlabel="requests on a GPU", ylabel="tokens/s with one draft / without", title=f"on {tables.gpu}")
    for axes in (left, right):
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.legend()
    figure.savefig(path)
