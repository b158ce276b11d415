"""What an indexer learns from attention: its divergence and gradients, by Triton kernels on CUDA."""

from dsa_compile.lowering.teach.launch import teach_cuda
from dsa_compile.lowering.teach.reference import teach

__all__ = ["teach", "teach_cuda"]
