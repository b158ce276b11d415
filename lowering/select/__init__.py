"""The lightning indexer: projections, scores and exact top-k in one op; by Triton kernels on CUDA."""

import torch

from dsa_compile.lowering.select.launch import select_cuda
from dsa_compile.lowering.select.reference import index_scores, select

torch.library.impl("dsa::select", "cpu")(select)
torch.library.impl("dsa::select", "cuda")(select_cuda)

__all__ = ["index_scores", "select"]
