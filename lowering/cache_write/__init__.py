"""Append rows to the pools of a layer's cache."""

import torch

from dsa_compile.lowering.cache_write.launch import cache_write_cuda
from dsa_compile.lowering.cache_write.reference import cache_write

torch.library.impl("dsa::cache_write", "cpu")(cache_write)
torch.library.impl("dsa::cache_write", "cuda")(cache_write_cuda)

__all__ = ["cache_write"]
