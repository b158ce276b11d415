"""Needles are long enough, hold the code that they ask for, and are the same every time."""

import random

from dsa_compile.needles import CODES_PER_PROMPT, MODULES, make_needle, make_needles


def words(text):
    return len(text.split())


def test_prompts_go_around_the_modules():
    needles = make_needles(12, 200, words)
    assert [n.file for n in needles] == [f"{module}.py" for module in (*MODULES, *MODULES[:2])]
    assert needles[0].prompt != needles[10].prompt
    assert needles == make_needles(12, 200, words)
    for needle in needles:
        name = needle.prompt.rpartition("the code of ")[2].removesuffix(" is")
        assert f"The code of {name} is {needle.code}.\n" in needle.prompt
        assert needle.prompt.count("The code of ") == CODES_PER_PROMPT
        assert words(needle.prompt) > 200


def test_a_module_that_ends_early_is_followed_by_the_next():
    needle = make_needle(MODULES.index("copy"), 3000, words, random.Random(0))
    assert needle.file == "copy.py"
    assert "class Dialect" in needle.prompt  # csv.py
    assert words(needle.prompt) > 3000
