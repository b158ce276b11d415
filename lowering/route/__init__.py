"""Which experts a token goes to, in one launch. Has no gradient: the pass that inserts it leaves training alone."""

import torch

from dsa_compile.lowering.route.launch import route_cuda
from dsa_compile.lowering.route.reference import route

torch.library.impl("dsa::route", "cpu")(route)
torch.library.impl("dsa::route", "cuda")(route_cuda)

__all__ = ["route"]
