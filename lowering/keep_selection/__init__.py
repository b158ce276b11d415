"""The selection of a sequence's last token, kept for the token behind it."""

import torch

from dsa_compile.lowering.keep_selection.reference import keep_selection

torch.library.impl("dsa::keep_selection", "cpu")(keep_selection)
torch.library.impl("dsa::keep_selection", "cuda")(keep_selection)

__all__ = ["keep_selection"]
