"""The values that a pool of fp8 rows holds."""

import torch

from dsa_compile.lowering.cache_read.reference import cache_read

torch.library.impl("dsa::cache_read", ("cpu", "cuda"))(cache_read)

__all__ = ["cache_read"]
