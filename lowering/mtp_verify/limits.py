"""What ``dsa::mtp_verify`` takes: every error is raised before anything is computed, at capture too."""

import torch
from torch import Tensor

from dsa_compile.errors import InputError


def check(
    target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, uniforms: Tensor, greedy: bool
) -> None:
    """Refuse inputs that the op would misread.

    Raises:
        InputError: naming the input, what was expected and what came.
    """
    if target_probs.dim() != 3 or 0 in target_probs.shape[1:]:
        raise InputError(
            f"mtp_verify: expected target_probs [B, M+1, vocab], came {list(target_probs.shape)}. A step that drafted "
            "nothing still has the row of its next token."
        )
    B, rows, vocab = target_probs.shape
    shapes = {
        "draft_tokens": (draft_tokens, (B, rows - 1)),
        "draft_probs": (draft_probs, (B, rows - 1, vocab)),
        "uniforms": (uniforms, (B, rows)),
    }
    for name, (x, shape) in shapes.items():
        if x is None:
            continue
        if x.shape != shape:
            raise InputError(
                f"mtp_verify: expected {name} {list(shape)} for target_probs {list(target_probs.shape)}, came "
                f"{list(x.shape)}. Give one draft less than rows, and one uniform a row."
            )
        if x.device != target_probs.device:
            raise InputError(
                f"mtp_verify: expected {name} on {target_probs.device} as target_probs, came {x.device}. Move it there."
            )
    if draft_tokens.dtype != torch.int64:
        raise InputError(
            f"mtp_verify: expected draft_tokens in int64, came {draft_tokens.dtype}. Convert it with .long()."
        )
    if not greedy and target_probs.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"mtp_verify: expected target_probs in float32 or float64, came {target_probs.dtype}. Take the softmax in "
            "float32; greedy=True takes logits of any dtype."
        )
    if draft_probs is not None and draft_probs.dtype != target_probs.dtype:
        raise InputError(
            f"mtp_verify: expected draft_probs in {target_probs.dtype} as target_probs, came {draft_probs.dtype}. "
            "Convert it with .to()."
        )
