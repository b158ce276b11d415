"""The exact selection by a layer's own attention."""

import torch

from dsa_compile.lowering.select_attention.reference import select_attention

torch.library.impl("dsa::select_attention", ("cpu", "cuda"))(select_attention)

__all__ = ["select_attention"]
