"""Pools in pages: moving pages and telling the block table changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SELECTION_KINDS, causal, mla_rows, seeds, selection_row

from dsa_compile.dims import LayerDims
from dsa_compile.errors import InputError
from dsa_compile.lowering.fp8_keys import quantise
from dsa_compile.lowering.fp8_rows import pack, unpack

DIMS = LayerDims(n_heads=3, kv_lora_rank=12, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
R, P = DIMS.kv_lora_rank, DIMS.qk_rope_head_dim
SPARE = 3
PAGE_SIZES = (1, 16, 61, 64, 128)
page_sizes = pytest.mark.parametrize("page_size", PAGE_SIZES)
formats = pytest.mark.parametrize("fp8", [False, True], ids=["values", "fp8"])


def inputs(device, slots=140, fp8=False, dtype=torch.float32, seed=0):
    """q_absorbed, q_pe, pool [B, S, width], visible, topk_indices with a row of every kind, scale."""
    rows = mla_rows(DIMS, 2, 4, slots, device, dtype=dtype, seed=seed)
    q_absorbed = torch.einsum("bhtn,hnr->bthr", rows.q[..., :5], rows.kv_b_weight.view(3, -1, R)[:, :5])
    pool = pack(rows.c_kv, rows.k_pe) if fp8 else torch.cat([rows.c_kv, rows.k_pe], -1)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.stack([selection_row(kind, slots, 9, generator) for kind in SELECTION_KINDS])
    return q_absorbed, rows.q[..., 5:].transpose(1, 2), pool, rows.visible, picks.view(2, 4, 9).to(device), rows.scale


def paged(pool, page_size, seed=0):
    """The pool in shuffled pages, its block table, NaN in the rest of last pages and in pages that nobody has."""
    B, S, *width = pool.shape
    columns = -(-S // page_size)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(B * columns + SPARE, generator=generator)[: B * columns].int().view(B, columns)
    pages = unknown(pool.new_empty(B * columns + SPARE, page_size, *width))
    table = table.to(pool.device)
    padded = unknown(pool.new_empty(B, columns * page_size, *width))
    padded[:, :S] = pool
    pages[table.long()] = padded.unflatten(1, (columns, page_size))
    return pages, table


def unknown(pool):
    """All NaN; 0xFF is NaN as e4m3, as a scale and as bfloat16."""
    return pool.fill_(0xFF if pool.dtype == torch.uint8 else float("nan"))


@page_sizes
@formats
def test_pages_in_any_order_give_the_same_bits(device, page_size, fp8):
    q_absorbed, q_pe, pool, visible, picks, scale = inputs(device, fp8=fp8)
    pages, table = paged(pool, page_size)
    for chosen in (None, picks):
        want = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, pool, visible, None, chosen, scale)
        found = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, pages, visible, None, chosen, scale, table)
        assert all(torch.equal(one, two) for one, two in zip(found, want))
        assert want[0].isfinite().all()


@given(seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_fp8_rows_count_as_the_values_that_cache_read_gives(device, seed, dtype):
    q_absorbed, q_pe, pool, visible, picks, scale = inputs(device, 20, fp8=True, dtype=dtype, seed=seed)
    values = torch.ops.dsa.cache_read(pool, R, P, dtype)
    for chosen in (None, picks):
        want = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, values, visible, None, chosen, scale)
        found = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, pool, visible, None, chosen, scale)
        assert all(torch.equal(one, two) for one, two in zip(found, want))


def test_a_selection_reads_the_selected_rows_alone(device, monkeypatch):
    from dsa_compile.lowering.sparse_mla import reference

    sizes = []
    monkeypatch.setattr(reference, "unpack", lambda rows, *rest: sizes.append(rows.shape[:-1]) or unpack(rows, *rest))
    q_absorbed, q_pe, pool, visible, picks, scale = inputs(device, fp8=True)
    reference.sparse_mla(q_absorbed, q_pe, pool, visible, None, picks, scale)
    assert sizes == [(2, 4, 9)]


@page_sizes
@formats
def test_slots_of_an_absent_page_are_not_selected(device, page_size, fp8):
    q_absorbed, q_pe, pool, visible, picks, scale = inputs(device, fp8=fp8)
    pages, table = paged(pool, page_size)
    slots = torch.arange(pool.shape[1], device=device)
    for absent in (-1, len(pages), -(2**31)):
        table[1, table.shape[1] // 2] = absent
        present = torch.ones(2, pool.shape[1], dtype=torch.bool, device=device)
        present[1] = slots // page_size != table.shape[1] // 2
        mask = present[:, None, None]
        for chosen in (None, picks):
            want = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, pool, visible, mask, chosen, scale)
            found = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, pages, visible, None, chosen, scale, table)
            torch.testing.assert_close(found, want)


def test_a_sequence_without_pages_sees_nothing(device):
    q_absorbed, q_pe, pool, visible, picks, scale = inputs(device)
    pages, table = paged(pool, 16)
    table[0] = -1
    for chosen in (None, picks):
        out, lse = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, pages, visible, None, chosen, scale, table)
        assert not out[0].any()
        assert lse[0].isneginf().all()


def index_inputs(device, fp8, slots=140):
    """q and weights of an indexer, the pools [B, S, ...] of its keys, in fp8 of codes and scales, and visible.

    Small integers, whose scores are exact in every order of summing.
    """
    q, keys = (torch.randint(-4, 5, (2, n, 16), device=device).float() for n in (12, slots))
    q, weights = q.view(2, 4, 3, 16), torch.randint(-4, 5, (2, 4, 3), device=device).float()
    return q, weights, quantise(keys) if fp8 else (keys, None), causal(2, 4, slots).to(device)


def pools_in_pages(pools, page_size):
    """Both pools of index keys by the same block table."""
    (keys, table), scales = paged(pools[0], page_size), pools[1]
    return keys, None if scales is None else paged(scales, page_size)[0], table


@page_sizes
@formats
def test_the_indexer_chooses_the_same_slots_in_any_pages(device, page_size, fp8):
    q, weights, pools, visible = index_inputs(device, fp8)
    keys, scales, table = pools_in_pages(pools, page_size)
    for topk in (9, 140, 500):
        want = torch.ops.dsa.select(q, weights, pools[0], visible, None, topk, 0.25, 1 << 20, None, pools[1])
        found = torch.ops.dsa.select(q, weights, keys, visible, None, topk, 0.25, 1 << 20, table, scales)
        assert torch.equal(found, want)


@page_sizes
@formats
def test_the_indexer_chooses_no_slot_of_an_absent_page(device, page_size, fp8):
    """Where it has a choice; a row that sees no more than K slots takes them unseen, and nobody attends to them."""
    q, weights, pools, visible = index_inputs(device, fp8)
    keys, scales, table = pools_in_pages(pools, page_size)
    for absent in (-1, len(keys), -(2**31)):
        table[1, table.shape[1] // 2] = absent
        present = torch.ones(2, 140, dtype=torch.bool, device=device)
        present[1] = torch.arange(140, device=device) // page_size != table.shape[1] // 2
        mask = present[:, None, None]
        for topk in (9, 100):
            want = torch.ops.dsa.select(q, weights, pools[0], visible, mask, topk, 0.25, 1 << 20, None, pools[1])
            found = torch.ops.dsa.select(q, weights, keys, visible, None, topk, 0.25, 1 << 20, table, scales)
            assert torch.equal(found, want)


@given(
    seed=seeds,
    page_size=st.sampled_from([1, 2, 5, 16]),
    fp8=st.booleans(),
    lost=st.booleans(),
    slots=st.lists(
        st.permutations(range(12)).map(lambda p: [s if s < 8 else -1 - s for s in p[:4]]), min_size=1, max_size=3
    ),
)
def test_writes_go_through_the_block_table(device, seed, page_size, fp8, lost, slots):
    generator = torch.Generator().manual_seed(seed)
    B, DI, width = len(slots), 3, 20
    c_kv, k_pe, index_key = (torch.randn(B, 4, n, generator=generator).to(device) for n in (R, P, DI))
    rows = [pack(c_kv, k_pe), *quantise(index_key)] if fp8 else [torch.cat([c_kv, k_pe], -1), index_key]
    pools = [paged(x.new_zeros(B, width, *x.shape[2:]), page_size, seed)[0] for x in rows]
    table = paged(index_key.new_zeros(B, width), page_size, seed)[1]
    if lost:
        table[0] = -1
    want = [pool.clone() for pool in pools]
    for b, row in enumerate(slots):
        for t, slot in enumerate(row):
            page = int(table[b, slot // page_size]) if slot >= 0 else -1
            for pool, values in zip(want, rows) if page >= 0 else ():
                pool[page, slot % page_size] = values[b, t]
    latent, index_keys, *scales = pools
    places = torch.tensor(slots, device=device)
    torch.ops.dsa.cache_write(latent, index_keys, places, c_kv, k_pe, index_key, table, *scales)
    torch.testing.assert_close(pools, want, atol=0, rtol=0, equal_nan=True)


@formats
def test_written_without_pages_too(device, fp8):
    c_kv, k_pe = torch.randn(2, 3, R, device=device), torch.randn(2, 3, P, device=device)
    rows = pack(c_kv, k_pe) if fp8 else torch.cat([c_kv, k_pe], -1)
    pool = unknown(rows.new_empty(2, 6, rows.shape[-1]))
    want = pool.clone()
    want[0, [4, 1]], want[1, [0, 5, 2]] = rows[0, :2], rows[1]
    slots = torch.tensor([[4, 1, -1], [0, 5, 2]], device=device)
    torch.ops.dsa.cache_write(pool, c_kv.new_empty(2, 6, 0), slots, c_kv, k_pe, None)
    assert torch.equal(pool.view(torch.uint8), want.view(torch.uint8))


@formats
def test_opcheck(device, fp8):
    q_absorbed, q_pe, pool, visible, picks, scale = inputs(device, 20, fp8=fp8)
    pages, table = paged(pool, 8)
    for chosen in (None, picks):
        args = q_absorbed, q_pe, pages, visible, None, chosen, scale, table
        torch.library.opcheck(torch.ops.dsa.sparse_mla.default, args)
        torch.library.opcheck(torch.ops.dsa.sparse_mla.default, (q_absorbed, q_pe, pool, visible, None, chosen, scale))
    pool = torch.zeros_like(pages)
    slots = torch.tensor([[0, 9, -1], [-1, 2, 1]], device=device)
    rows = torch.randn(2, 3, R, device=device), torch.randn(2, 3, P, device=device)
    q, weights, pools, visible = index_inputs(device, fp8, 20)
    keys, scales, table = pools_in_pages(pools, 8)
    args = pool, keys, slots, *rows, torch.randn(2, 3, 16, device=device), table, scales
    torch.library.opcheck(torch.ops.dsa.cache_write.default, args)
    args = q, weights, keys, visible, None, 4, 0.25, 1 << 20, table, scales
    torch.library.opcheck(torch.ops.dsa.select.default, args)


@pytest.mark.parametrize(("fp8", "in_pages", "kind"), [(True, False, "quantised"), (False, True, "paged")])
def test_there_is_no_gradient_through_such_a_cache(device, fp8, in_pages, kind):
    q_absorbed, q_pe, pool, visible, picks, scale = inputs(device, 20, fp8=fp8)
    pool, table = paged(pool, 8) if in_pages else (pool, None)
    for run in (torch.ops.dsa.sparse_mla, torch.compile(torch.ops.dsa.sparse_mla, backend="aot_eager")):
        out, _ = torch.ops.dsa.sparse_mla(q_absorbed, q_pe, pool, visible, None, picks, scale, table)
        leaf = q_absorbed.clone().requires_grad_()
        with pytest.raises(
            (InputError, RuntimeError), match=f"came a {kind} cache, through which there is no gradient"
        ):
            run(leaf, q_pe, pool, visible, None, picks, scale, table)[0].sum().backward()
    assert out.isfinite().all()
