"""The lightning indexer: projections, scores and exact top-k in one op."""

import torch

from dsa_compile.lowering.select.reference import index_scores, select

torch.library.impl("dsa::select", ("cpu", "cuda"))(select)

__all__ = ["index_scores", "select"]
