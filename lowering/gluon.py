"""Whether kernels in Gluon, Triton's lower level, can be had."""

import warnings
from functools import cache
from importlib import import_module


@cache
def available(op: str, module: str) -> bool:
    """Whether the installed triton has what ``module``, a kernel of ``op``, is written in; warns where it has not."""
    try:
        import_module(module)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"dsa::{op} runs as its portable Triton kernel, not as the faster one for Hopper: {error}.", stacklevel=2
        )
        return False
    return True
