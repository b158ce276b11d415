"""``dsa-compile bench attention``: sparse MLA attention against float64 first, and what is right against the clock."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsa_compile.bench import attention_runs as runs
from dsa_compile.bench import table
from dsa_compile.bench.attention_cases import CASES
from dsa_compile.bench.attention_check import checked
from dsa_compile.bench.harness import Bench, run
from dsa_compile.config import DSAConfig

COLUMNS = (
    table.CASE,
    table.TIME,
    table.SPREAD,
    table.TFLOPS,
    table.GBYTES,
    table.SHARE,
    table.figure("error", "error", ".2e"),
    table.figure("eager's", "eager_error", ".2e"),
    table.TARGET,
    table.CONFIGURATION,
)


def attention(
    names: Sequence[str] | None = None, lowering: str = "inductor", out: Path | None = None
) -> dict[str, Any]:
    """Check, then time ``dsa::sparse_mla``; see `harness.run`.

    Args:
        lowering: ``"inductor"`` runs what `torch.compile` makes of the op, ``"eager"`` the op as it stands.

    Raises:
        ConfigError: a case or the lowering is unknown, or there is no GPU.
    """
    lowering = DSAConfig(lowering=lowering).lowering
    bench = Bench(
        title="sparse MLA attention",
        cases=CASES,
        record=partial(runs.record, lowering=lowering),
        check=checked,
        columns=COLUMNS,
        peers=runs.flash_mla,
        settings={"lowering": lowering},
    )
    return run(bench, names, out)
