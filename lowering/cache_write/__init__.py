"""Append rows to the pools of a layer's cache."""

import torch

from dsa_compile.lowering.cache_write.reference import cache_write

torch.library.impl("dsa::cache_write", ("cpu", "cuda"))(cache_write)

__all__ = ["cache_write"]
