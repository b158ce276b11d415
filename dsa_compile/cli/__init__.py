"""The console script ``dsa-compile``."""

import typer

from dsa_compile.cli import bench, convert, evaluate, explain, generate, plan

app = typer.Typer(
    help="Sparse attention for DeepSeek-family models of Hugging Face.", no_args_is_help=True, add_completion=False
)
app.command()(explain.explain)
app.command()(generate.generate)
app.command("eval")(evaluate.evaluate)
app.command()(convert.convert)
app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")
