"""A row attends to what the token before it selected, and to itself; the last selection is kept for the next call."""

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from dsa_compile.lowering.keep_selection.previous import previous_rows, with_own_slot


@st.composite
def calls(draw):
    """Rows of documents over what is stored: own selections, kept ones, visible, as the indexer would make them."""
    batch, rows, index_topk = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(seeds))
    visible = torch.zeros(batch, 1, rows, 2, dtype=torch.int32)
    own = torch.full((batch, rows, index_topk), -1, dtype=torch.int32)
    kept = torch.full((batch, index_topk), -1, dtype=torch.int32)

    def pick(start, end):
        slots = (torch.randperm(end - start, generator=generator)[:index_topk].sort().values + start).int()
        return torch.nn.functional.pad(slots, (0, index_topk - len(slots)), value=-1)

    for b in range(batch):
        start, slot = 0, draw(st.integers(0, 8), label="stored")
        kept[b] = pick(start, slot)
        for t in range(rows):
            kind = draw(st.sampled_from(["token", "token", "token", "padding", "new document"]))
            if kind != "padding":
                start = slot if kind == "new document" else start
                visible[b, 0, t] = torch.tensor([start, slot + 1])
                own[b, t] = pick(start, slot + 1)
                slot += 1
    return own, kept, visible


@given(call=calls(), known=st.booleans())
def test_a_row_reads_the_selection_of_the_token_before(call, known, device):
    own, kept, visible = call
    ours = previous_rows(own.to(device), kept.to(device) if known else None, visible.to(device)).cpu()
    assert ours.dtype == torch.int32
    for b in range(len(own)):
        before = kept[b].tolist() if known else None
        for t, (start, end) in enumerate(visible[b, 0].tolist()):
            assert ours[b, t].tolist() == naive.a_token_late(own[b, t].tolist(), before, start, end)
            before = own[b, t].tolist() if end > start else before


@given(call=calls())
def test_what_a_row_attends_to_is_a_selection_with_itself_in_it(call, device):
    own, kept, visible = call
    picks = previous_rows(own.to(device), kept.to(device), visible.to(device)).cpu()
    for row, (start, end) in zip(picks.flatten(0, 1).tolist(), visible.flatten(0, 2).tolist()):
        chosen = [slot for slot in row if slot >= 0]
        assert row == sorted(set(chosen)) + [-1] * (len(row) - len(chosen))
        assert all(start <= slot < end for slot in chosen)
        assert chosen[-1:] == [end - 1][: end > start]


@given(call=calls())
def test_one_row_needs_nothing_but_what_was_kept(call, device):
    own, kept, visible = (x.to(device) for x in call)
    for t in range(own.shape[1]):
        alone = with_own_slot(kept.unsqueeze(1), visible[:, :, t : t + 1])
        assert torch.equal(alone, previous_rows(own[:, t : t + 1], kept, visible[:, :, t : t + 1]))


def test_the_second_lowest_makes_room():
    visible = torch.tensor([0, 10], dtype=torch.int32).view(1, 1, 1, 2)
    late = with_own_slot(torch.tensor([[[0, 3, 4, 7]]], dtype=torch.int32), visible)
    assert late.tolist() == [[[0, 4, 7, 9]]]


def test_the_last_row_with_a_slot_is_kept(device):
    rows = torch.arange(4 * 3 * 2, dtype=torch.int32, device=device).view(4, 3, 2)
    slots = torch.tensor([[0, 1, 2], [4, 5, -1], [-1, 7, -1], [-1, -1, -1]], device=device)
    kept = torch.full((4, 2), 99, dtype=torch.int32, device=device)
    torch.ops.dsa.keep_selection(kept, slots, None, True)
    assert kept.unique().tolist() == [99]
    torch.ops.dsa.keep_selection(kept, slots, rows, True)
    assert kept.tolist() == [rows[0, 2].tolist(), rows[1, 1].tolist(), rows[2, 1].tolist(), [99, 99]]


@pytest.mark.parametrize("named", [False, True])
def test_opcheck(named, device):
    rows = torch.zeros(2, 3, 4, dtype=torch.int32, device=device) if named else None
    kept, slots = torch.ones(2, 4, dtype=torch.int32, device=device), torch.arange(3, device=device).expand(2, 3)
    torch.library.opcheck(torch.ops.dsa.keep_selection.default, (kept, slots, rows, False))
