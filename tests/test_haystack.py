"""Questions have the length that was asked for, hold their answers where it was asked, and know them when said."""

from types import SimpleNamespace

import pytest
import torch

from dsa_compile.errors import ConfigError
from dsa_compile.haystack import PLANTED, NeedleSuite

HAYSTACK = torch.tensor([*b"some text, "])
LENGTH = 400


class Letters:
    """A tokenizer of letters."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[*text.encode()])


def asked(**fields):
    return NeedleSuite(**fields).questions(HAYSTACK, Letters(), LENGTH)


def text_of(question):
    bos, *letters = question.prompt.tolist()
    assert bos == Letters.bos_token_id
    return bytes(letters).decode()


@pytest.mark.parametrize(("kind", "planted", "answers"), [("single", 1, 1), ("multi-key", 4, 1), ("multi-value", 4, 4)])
def test_a_prompt_holds_what_it_asks_for(kind, planted, answers):
    for question in asked(kinds=[kind], lengths=[LENGTH, LENGTH + 1], repeats=2):
        text = text_of(question)
        assert (question.kind, len(question.prompt)) == (kind, question.length)
        assert text.count("The code of ") == planted
        name = text.rpartition(" of ")[2].split()[0]
        assert len(question.answers) == answers == len({*question.answers})
        for code in question.answers:
            assert f"\nThe code of {name} is {code}.\n" in text
        assert text.count(f"The code of {name} is") == answers


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
def test_a_code_lies_at_its_depth_in_text_that_goes_around(depth):
    (question,) = asked(kinds=["single"], depths=[depth])
    before, _, after = text_of(question).partition("\nThe code of ")
    after = after.partition(".\n")[2].partition("\nRecall: ")[0]
    assert len(before) == round(depth * len(before + after))
    assert before + after in HAYSTACK.numpy().tobytes()[::8].decode() * LENGTH


def test_the_suite_has_each_kind_length_and_depth_and_is_the_same_every_time():
    found = asked(lengths=[LENGTH, 500], depths=[0.1, 0.9], repeats=2)
    assert len(found) == 3 * 2 * 2 * 2
    assert len({text_of(question) for question in found}) == len(found)
    assert [text_of(question) for question in found] == [
        text_of(question) for question in asked(lengths=[LENGTH, 500], depths=[0.1, 0.9], repeats=2)
    ]
    assert asked()[0].length == LENGTH


def test_answers_may_come_in_any_order_and_first():
    (question,) = asked(kinds=["multi-value"], depths=[0.5])
    codes = question.answers
    assert len(codes) == PLANTED
    assert question.is_answered(f" {', '.join(codes[:-1])} and {codes[-1]}. Then 7")
    assert question.is_answered(" ".join(reversed(codes)))
    for said in ("", " ".join(codes[1:]), f"7, {' '.join(codes)}", " ".join([codes[0]] * 4), "".join(codes)):
        assert not question.is_answered(said)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kinds": ["double"]}, "kinds: expected some of single, multi-key, multi-value, came 'double'"),
        ({"depths": [0.5, 1.5]}, "depths: expected shares of the text, from 0 to 1, came 1.5"),
        ({"repeats": 0}, "repeats: expected at least 1, came 0"),
        (
            {"lengths": [40], "kinds": ["single"]},
            r"expected more than \d+ tokens for a single question, came 40",
        ),
    ],
)
def test_questions_that_cannot_be_asked_are_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        asked(**fields)
