"""Rows go to their slots and nowhere else."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from dsa_compile import lowering  # noqa: F401 (registers the ops)
from dsa_compile.lowering.fp8_keys import quantise

R, P, DI, S = 5, 2, 3, 12


def case(device, slots, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor(slots, device=device)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    B, T = slots.shape
    return normal(B, S, R + P), normal(B, S, DI), slots, normal(B, T, R), normal(B, T, P), normal(B, T, DI)


@given(
    slots=st.integers(1, 6).flatmap(
        lambda rows: st.lists(
            st.permutations(range(S)).map(lambda p: [s if s < 8 else -1 - s for s in p[:rows]]), min_size=1, max_size=3
        )
    ),
    seed=seeds,
    which=st.sampled_from(["latent", "index", "both"]),
)
def test_writes_each_row_to_its_slot(device, slots, seed, which):
    latent, index_keys, places, c_kv, k_pe, index_key = case(device, slots, seed=seed)
    want_latent, want_keys = latent.clone(), index_keys.clone()
    for b, row in enumerate(slots):
        for t, slot in enumerate(row):
            if slot >= 0 and which != "index":
                want_latent[b, slot, :R], want_latent[b, slot, R:] = c_kv[b, t], k_pe[b, t]
            if slot >= 0 and which != "latent":
                want_keys[b, slot] = index_key[b, t]
    addresses = latent.data_ptr(), index_keys.data_ptr()
    given_latent = (None, None) if which == "index" else (c_kv, k_pe)
    given_key = None if which == "latent" else index_key
    assert torch.ops.dsa.cache_write(latent, index_keys, places, *given_latent, given_key) is None
    assert torch.equal(latent, want_latent)
    assert torch.equal(index_keys, want_keys)
    assert addresses == (latent.data_ptr(), index_keys.data_ptr())


def test_padding_of_nan_leaves_no_trace(device):
    latent, index_keys, slots, c_kv, k_pe, index_key = case(device, [[-1, -1, 0, 1], [-1, -1, -1, -1]])
    for rows in (c_kv, k_pe, index_key):
        rows.masked_fill_((slots < 0)[..., None], float("nan"))
    before = latent.clone(), index_keys.clone()
    torch.ops.dsa.cache_write(latent, index_keys, slots, c_kv, k_pe, index_key)
    assert torch.equal(latent[0, 2:], before[0][0, 2:])
    assert torch.equal(latent[0, :2, :R], c_kv[0, 2:])
    assert torch.equal(latent[1], before[0][1])
    assert torch.equal(index_keys[1], before[1][1])


def test_rows_take_the_dtype_of_the_pool(device):
    latent, index_keys, slots, c_kv, k_pe, index_key = case(device, [[0, 1]])
    pools = latent.bfloat16(), index_keys.bfloat16()
    torch.ops.dsa.cache_write(*pools, slots, c_kv, k_pe, index_key)
    assert torch.equal(pools[0][0, :2], torch.cat([c_kv, k_pe], -1)[0].bfloat16())


def test_a_layer_without_an_indexer_has_an_empty_pool(device):
    latent, _, slots, c_kv, k_pe, _ = case(device, [[3, -1]])
    torch.ops.dsa.cache_write(latent, latent.new_empty(1, S, 0), slots, c_kv, k_pe, None)
    assert torch.equal(latent[0, 3], torch.cat([c_kv, k_pe], -1)[0, 0])


@given(seed=seeds, which=st.sampled_from(["latent", "index", "both"]))
def test_index_keys_in_fp8_go_to_two_pools(device, seed, which):
    latent, _, slots, c_kv, k_pe, _ = case(device, [[3, -1, 7, 0], [-1, -5, 2, 11]], seed=seed)
    key = torch.randn(2, 4, 16, device=device)
    key[0, 2, 5] = float("nan")
    key[slots < 0] = float("inf")
    pools = torch.randint(0, 255, (2, S, 16), device=device).byte(), torch.rand(2, S, device=device)
    want, rows = [pool.clone() for pool in (*pools, latent)], (*quantise(key), torch.cat([c_kv, k_pe], -1))
    for pool, values in zip(want, rows):
        if which == "both" or (which == "latent") == (pool is want[2]):
            for b, t in (slots >= 0).nonzero().tolist():
                pool[b, slots[b, t]] = values[b, t]
    given_latent = (None, None) if which == "index" else (c_kv, k_pe)
    key = None if which == "latent" else key
    torch.ops.dsa.cache_write(latent, pools[0], slots, *given_latent, key, None, pools[1])
    torch.testing.assert_close([*pools, latent], want, atol=0, rtol=0, equal_nan=True)


def test_opcheck(device):
    latent, index_keys, slots, c_kv, k_pe, index_key = case(device, [[0, 4, -1], [-1, 2, 1]])
    op = torch.ops.dsa.cache_write.default
    codes, scales = torch.zeros(2, S, 16, dtype=torch.uint8, device=device), torch.zeros(2, S, device=device)
    for key in (torch.randn(2, 3, 16, device=device), None):
        torch.library.opcheck(op, (latent, codes, slots, c_kv, k_pe, key, None, scales))
    torch.library.opcheck(op, (latent, index_keys, slots, c_kv, k_pe, index_key))
    torch.library.opcheck(op, (latent, index_keys, slots, c_kv, k_pe, None))
    torch.library.opcheck(op, (latent, index_keys, slots, None, None, index_key))
