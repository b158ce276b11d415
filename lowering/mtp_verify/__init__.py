"""Which drafts a target accepts, and the token that follows them. Has no gradient: what it gives are indices."""

import torch

from dsa_compile.lowering.mtp_verify.reference import mtp_verify

torch.library.impl("dsa::mtp_verify", ("cpu", "cuda"))(mtp_verify)

__all__ = ["mtp_verify"]
