"""Texts become rows of tokens, or errors that name them."""

from types import SimpleNamespace

import pytest
import torch

from dsa_compile.errors import ConfigError, InputError
from dsa_compile.texts import documents_in, encode, loss_past_k, packed_rows, read_texts, token_rows


class Letters:
    """A tokenizer of letters."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def test_a_row_is_the_start_of_a_text_behind_bos():
    strings, ids = token_rows(["abcdefgh", torch.arange(9)], Letters(), 5, 2)
    assert strings.tolist() == [1, *b"abcd"]
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert encode(Letters(), "\x01a").tolist() == [1, ord("a")]
    assert [len(row) for row in token_rows(["a" * 9, "a" * 5], Letters(), None, 2)] == [8, 6]


def test_the_loss_is_that_of_rows_that_see_more_than_k():
    ids = torch.tensor([5, 3, 0, 4, 1])
    logits = torch.randn(5, 6, dtype=torch.float64)
    # rows 2 and 3 see three and four tokens
    want = -(logits[2].log_softmax(0)[4] + logits[3].log_softmax(0)[1])
    assert loss_past_k(logits, ids, 2) == (pytest.approx(want.item()), 2)


def test_documents_are_packed_behind_one_another_and_the_rest_is_left():
    rows = packed_rows(["abc", "d"], Letters(), 4)
    assert [row["input_ids"].tolist() for row in rows] == [[1, *b"abc"], [2, 1, *b"d", 2]]
    assert [[*row] for row in rows] == [["input_ids"], ["input_ids"]]
    isolated = packed_rows(["abc", "d", "ef"], Letters(), 6, isolate=True)
    assert [row["position_ids"].tolist() for row in isolated] == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 2, 3]]
    with pytest.raises(InputError, match="at least one row of 9 tokens, came 8 in all"):
        packed_rows(["abc", "d"], Letters(), 9)


@pytest.mark.parametrize(
    ("texts", "tokenizer", "tokens", "error", "words"),
    [
        ([], Letters(), None, InputError, "expected at least one, came none"),
        (["abcd", ""], Letters(), None, InputError, "text 1 of 2: expected at least K [+] 2 = 4 tokens"),
        (["ab"], Letters(), None, InputError, r"came \(3,\)"),
        (["abcd"], None, None, InputError, "strings need tokenizer="),
        ([torch.ones(1, 9)], None, None, InputError, r"came \(1, 9\)"),
        (["abcd"], Letters(), 3, ConfigError, "tokens: expected at least K [+] 2 = 4"),
    ],
)
def test_texts_that_say_nothing_of_a_plan_are_named(texts, tokenizer, tokens, error, words):
    with pytest.raises(error, match=words):
        token_rows(texts, tokenizer, tokens, 2)


def test_a_folder_stands_for_its_files(tmp_path):
    for name in "ba":
        (tmp_path / name).write_text(f"text {name}")
    assert read_texts([tmp_path / "b", tmp_path]) == ["text b", "text a", "text b"]


def test_a_text_may_hold_several_documents():
    assert documents_in(["a<|endoftext|> b<|endoftext|>\n", "c"]) == ["a", " b", "c"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_is_no_text_is_named(content, tmp_path):
    if content:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.txt: cannot be read as text"):
        read_texts([tmp_path / "a.txt"])
