"""What fits on a GPU, as a table."""

from io import StringIO

from rich.console import Console
from rich.table import Table

from dsa_compile.cost.capacity import USABLE, Capacity


def fit_table(title: str, capacity: Capacity, context: int, batch: int) -> Table:
    """``capacity`` at ``batch`` sequences of ``context`` tokens."""
    table = Table(title=title, caption="a selection reads less of the cache and stores no less", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row(f"memory, {USABLE:.0%} of it", f"{capacity.memory * USABLE / 1e9:,.2f} GB")
    table.add_row("weights", f"{capacity.weights / 1e9:,.2f} GB")
    table.add_row("a prompt while it runs", f"{capacity.workspace / 1e9:,.2f} GB")
    table.add_row("a cached token", f"{capacity.token:,} B")
    table.add_row(f"cache of {batch:,} x {context:,} tokens", f"{capacity.token * batch * context / 1e9:,.2f} GB")
    table.add_section()
    table.add_row("fits", "yes" if capacity.fits(context, batch) else "no")
    table.add_row(f"sequences of {context:,} tokens that fit", f"{capacity.largest_batch(context):,}")
    table.add_row(f"tokens of a sequence that fit, {batch:,} at once", f"{capacity.longest_context(batch):,}")
    return table


def fit_text(title: str, capacity: Capacity, context: int, batch: int) -> str:
    """`fit_table` as the text of an error."""
    text = StringIO()
    Console(file=text, width=100).print(fit_table(title, capacity, context, batch))
    return text.getvalue()
