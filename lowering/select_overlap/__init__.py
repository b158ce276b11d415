"""``dsa::select`` in two halves, so that a GPU scores beside the attention and the MLP of the layer."""

import torch

from dsa_compile.lowering.select_overlap.reference import select_start, select_wait
from dsa_compile.lowering.select_overlap.streams import select_start_cuda, select_wait_cuda

torch.library.impl("dsa::select_start", "cpu")(select_start)
torch.library.impl("dsa::select_start", "cuda")(select_start_cuda)
torch.library.impl("dsa::select_wait", "cpu")(select_wait)
torch.library.impl("dsa::select_wait", "cuda")(select_wait_cuda)

__all__ = ["select_start", "select_wait"]
