"""The dsa:: ops: schemas in `ops`, one folder per op with its reference (the specification) and its kernels.

Importing this package registers every op for CPU and CUDA.
"""

from dsa_compile.lowering import ops  # isort: skip  # the schemas come first
from dsa_compile.lowering import (
    cache_read,
    cache_write,
    keep_selection,
    mla,
    mtp_verify,
    prefill_mla,
    route,
    row_products,
    select,
    select_attention,
    select_overlap,
    sparse_mla,
)


def register_inductor() -> None:
    """Make Inductor lower the ops that have templates to them."""
    from dsa_compile.lowering.sparse_mla.inductor import register

    register()


__all__ = [
    "cache_read",
    "cache_write",
    "keep_selection",
    "mla",
    "mtp_verify",
    "ops",
    "prefill_mla",
    "route",
    "row_products",
    "select",
    "select_attention",
    "select_overlap",
    "sparse_mla",
]
