"""What ``dsa::select`` and the write of its keys would misread is named, before anything runs and at capture."""

import re

import pytest
import torch
from strategies import causal

from dsa_compile import lowering  # noqa: F401 (registers the ops)
from dsa_compile.errors import InputError
from dsa_compile.lowering.select.limits import check_width

INT64, UINT8 = torch.int64, torch.uint8


def good(device, fp8=False):
    keys = torch.zeros(2, 8, 16, device=device)
    return {
        "q": torch.zeros(2, 3, 4, 16, device=device),
        "weights": torch.zeros(2, 3, 4, device=device),
        "index_keys": keys.byte() if fp8 else keys,
        "visible": causal(2, 3, 8).to(device),
        "mask": None,
        "index_topk": 2,
        "scale": 0.25,
        "budget": 32,
        "block_table": None,
        "index_scales": torch.ones(2, 8, device=device) if fp8 else None,
    }


def changed(arguments, device, changes):
    made = {}
    for name, form in changes.items():
        if isinstance(form, tuple):
            shape, dtype = form if isinstance(form[0], tuple) else (form, torch.float32)
            form = torch.zeros(shape, dtype=dtype, device=device)
        made[name] = form
    return arguments | made


def refused(arguments, message, op="select"):
    for x in (arguments, {name: x.to("meta") if torch.is_tensor(x) else x for name, x in arguments.items()}):
        with pytest.raises(InputError, match=re.escape(f"{op}: expected {message}")):
            getattr(torch.ops.dsa, op)(**x)


BAD = {
    "no token": ({"index_topk": 0}, "index_topk from 1 to 8192, came 0"),
    "too many tokens": ({"index_topk": 8193}, "index_topk from 1 to 8192, came 8193"),
    "no row fits": ({"budget": 31}, "a budget of at least 32 bytes, a float32 score for each of 8 slots, came 31"),
    "another head": ({"weights": (2, 3, 5)}, "weights [2, 3, 4] for q [2, 3, 4, 16], came [2, 3, 5]"),
    "ranges in int64": ({"visible": ((2, 1, 3, 2), INT64)}, "visible in int32, came torch.int64"),
    "pages in int64": ({"block_table": ((2, 1), INT64)}, "block_table in int32, came torch.int64"),
    "fewer ranges": ({"visible": ((1, 1, 3, 2), torch.int32)}, "visible of 2 sequences as q, came 1"),
    "more masks": ({"mask": ((3, 1, 1, 8), torch.bool)}, "mask of 2 sequences as q, came 3"),
    "fewer tables": ({"block_table": ((1, 1), torch.int32)}, "block_table of 2 sequences as q, came 1"),
    "another width": ({"index_keys": (2, 8, 32)}, "index_keys of 16 values as q, came 32"),
    "fewer pools": ({"index_keys": (1, 8, 16)}, "index_keys of 2 sequences as q, came 1"),
}
SCALES = "index_scales torch.float32[2, 8], one a key, came"
BAD_POOLS = {
    "no scales": ({"index_scales": None}, "index_scales with index_keys in uint8, came None"),
    "scales of values": ({"index_keys": (2, 8, 16)}, "index_keys in uint8 with index_scales, came torch.float32"),
    "fewer scales": ({"index_scales": (2, 7)}, f"{SCALES} torch.float32[2, 7]"),
    "a scale a value": ({"index_scales": (2, 8, 16)}, f"{SCALES} torch.float32[2, 8, 16]"),
    "scales in bytes": ({"index_scales": ((2, 8), UINT8)}, f"{SCALES} torch.uint8[2, 8]"),
}


@pytest.mark.parametrize("name", BAD)
def test_named_errors(device, name):
    changes, message = BAD[name]
    refused(changed(good(device), device, changes), message)


@pytest.mark.parametrize("name", BAD_POOLS)
def test_keys_and_scales_that_do_not_belong_together(device, name):
    changes, message = BAD_POOLS[name]
    arguments = changed(good(device, fp8=True), device, changes)
    refused(arguments, message)
    write = {n: arguments[n] for n in ("index_keys", "index_scales")} | {"c_kv": None, "k_pe": None}
    write |= {"latent": torch.zeros(2, 8, 6, device=device), "slots": torch.zeros(2, 1, dtype=INT64, device=device)}
    refused(write | {"index_key": torch.zeros(2, 1, 16, device=device)}, message, "cache_write")


def test_widths_that_are_no_multiple_of_16(device):
    message = "an index_head_dim that is a multiple of 16, came 12 with index_keys in"
    sizes = {"q": (2, 3, 4, 12), "index_keys": ((2, 8, 12), UINT8)}
    refused(changed(good(device, fp8=True), device, sizes), message)
    values = changed(good(device), device, {"q": (2, 3, 4, 12), "index_keys": (2, 8, 12)})
    torch.ops.dsa.select(**values)
    with pytest.raises(InputError, match=f"expected {message} torch.float32"):
        check_width(values["index_keys"])


def test_keys_that_are_not_contiguous(device):
    keys = good(device)["index_keys"].mT.contiguous().mT
    refused(
        good(device) | {"index_keys": keys}, "index_keys contiguous in its last dimension, came strides [128, 1, 8]"
    )


def test_tensors_on_another_device(device):
    for name in ("weights", "index_keys", "visible", "index_scales"):
        arguments = good(device, fp8=True)
        arguments[name] = arguments[name].to("meta")
        with pytest.raises(InputError, match=f"expected {name} on {device.type}.* as q, came meta"):
            torch.ops.dsa.select(**arguments)


def test_budgets_of_a_row_shared_masks_and_pools_in_pages_are_taken(device):
    mask = {"visible": None, "mask": ((1, 1, 1, 8), torch.bool)}
    pages = {"index_keys": (5, 4, 16), "block_table": ((2, 2), torch.int32)}
    for changes in ({"budget": 32}, mask, pages):
        torch.ops.dsa.select(**changed(good(device), device, changes))
    paged = changed(good(device), device, pages) | {"budget": 31}
    refused(paged, "a budget of at least 32 bytes, a float32 score for each of 8 slots, came 31")
