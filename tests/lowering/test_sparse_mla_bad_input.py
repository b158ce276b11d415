"""Inputs that an implementation would misread are named, before anything runs and while a graph is captured."""

import re

import pytest
import torch
from strategies import mla_rows

from dsa_compile import lowering  # noqa: F401 (registers the ops)
from dsa_compile.dims import LayerDims
from dsa_compile.errors import CacheError, InputError

DIMS = LayerDims(n_heads=2, kv_lora_rank=12, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
NAMES = ("q_absorbed", "q_pe", "latent", "visible", "mask", "topk_indices", "scale", "block_table")


def good(device):
    rows = mla_rows(DIMS, 2, 3, 8, device, dtype=torch.float32)
    q_absorbed, q_pe = torch.zeros(2, 3, 2, 12, device=device), rows.q[..., 5:].transpose(1, 2)
    picks = torch.zeros(2, 3, 4, dtype=torch.int32, device=device)
    return dict(
        zip(NAMES, (q_absorbed, q_pe, torch.cat([rows.c_kv, rows.k_pe], -1), rows.visible, None, picks, rows.scale))
    )


BAD = {
    "no head": ({"q_absorbed": (2, 3, 0, 12), "q_pe": (2, 3, 0, 4)}, "at least one head, came [2, 3, 0, 12]"),
    "another width": ({"latent": (2, 8, 17)}, "expected latent torch.float32[..., 16] for q_absorbed torch.float32"),
    "another dtype": ({"latent": ((2, 8, 16), torch.bfloat16)}, "came torch.bfloat16[..., 16]"),
    "no fp8 rows": ({"latent": ((2, 8, 16), torch.uint8)}, "expected latent torch.uint8[..., 24]"),
    "selection in int64": ({"topk_indices": ((2, 3, 4), torch.int64)}, "expected topk_indices in int32, came torch."),
    "ranges in int64": ({"visible": ((2, 1, 3, 2), torch.int64)}, "expected visible in int32, came torch.int64"),
    "pages in int64": ({"block_table": ((2, 1), torch.int64)}, "expected block_table in int32, came torch.int64"),
    "fewer pools": ({"latent": (1, 8, 16)}, "expected latent of 2 sequences as q_absorbed, came 1"),
    "fewer ranges": ({"visible": ((1, 1, 3, 2), torch.int32)}, "expected visible of 2 sequences as q_absorbed, came 1"),
    "more masks": ({"mask": ((3, 1, 1, 8), torch.bool)}, "expected mask of 2 sequences as q_absorbed, came 3"),
    "fewer selections": ({"topk_indices": ((1, 3, 4), torch.int32)}, "expected topk_indices of 2 sequences"),
    "fewer tables": ({"block_table": ((1, 1), torch.int32)}, "expected block_table of 2 sequences as q_absorbed, came"),
}


def bad(device, changes):
    made = {}
    for name, form in changes.items():
        shape, dtype = form if isinstance(form[0], tuple) else (form, torch.float32)
        made[name] = torch.zeros(shape, dtype=dtype, device=device)
    return made


def refused(arguments, message, error=InputError):
    for x in (arguments, {name: x.to("meta") if torch.is_tensor(x) else x for name, x in arguments.items()}):
        with pytest.raises(error, match=re.escape(message)):
            torch.ops.dsa.sparse_mla(**x)


@pytest.mark.parametrize("name", BAD)
def test_named_errors(device, name):
    changes, message = BAD[name]
    refused(good(device) | bad(device, changes), message)


def test_rows_that_are_not_contiguous_are_refused(device):
    latent = good(device)["latent"].mT.contiguous().mT
    refused(good(device) | {"latent": latent}, "contiguous in its last dimension, came strides [128, 1, 8]")


def test_tensors_on_another_device_are_refused(device):
    for name in ("q_pe", "latent", "visible", "topk_indices"):
        arguments = good(device)
        arguments[name] = arguments[name].to("meta")
        with pytest.raises(InputError, match=f"expected {name} on {device.type}.* as q_absorbed, came meta"):
            torch.ops.dsa.sparse_mla(**arguments)


def test_sizes_without_fp8_rows_are_refused(device):
    changes = {"q_absorbed": (2, 3, 2, 9), "latent": ((2, 8, 21), torch.uint8)}
    refused(good(device) | bad(device, changes), "expected a kv_lora_rank that is a multiple of 4", CacheError)


def test_shared_masks_and_pools_in_pages_are_taken(device):
    mask = {"visible": None, "mask": torch.ones(1, 1, 1, 8, dtype=torch.bool, device=device)}
    pages = {"latent": (5, 4, 16), "block_table": ((2, 2), torch.int32)}
    for changes in (mask, bad(device, pages)):
        torch.ops.dsa.sparse_mla(**(good(device) | changes))
