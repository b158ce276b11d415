"""Long prompts with planted codes; the text is the Python standard library's source, so that every machine has it."""

import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MODULES = ("argparse", "ast", "calendar", "cmd", "codecs", "copy", "csv", "difflib", "gzip", "textwrap")
CODES_PER_PROMPT = 4


@dataclass(frozen=True)
class Needle:
    file: str
    prompt: str
    code: str


def make_needles(prompts: int, tokens: int, count: Callable[[str], int]) -> list[Needle]:
    """One prompt a module, each of about ``tokens``; ``count`` counts the tokens of a text."""
    rng = random.Random(0)
    return [make_needle(f"{module}.py", tokens, count, rng) for module in MODULES[:prompts]]


def make_needle(file: str, tokens: int, count: Callable[[str], int], rng: random.Random) -> Needle:
    """A file's source with codes planted between its lines, cut to about ``tokens``, and a question for one."""
    lines: list[str] = []
    for line in (Path(sysconfig.get_paths()["stdlib"]) / file).read_text().splitlines(keepends=True):
        lines.append(line)
        if len(lines) % 20 == 0 and count("".join(lines)) > tokens:
            break
    names = [
        "".join(rng.choice("bdfgjklmnprtvz") + rng.choice("aeiou") for _ in range(3)) for _ in range(CODES_PER_PROMPT)
    ]
    codes = [str(rng.randrange(1000, 10000)) for _ in names]
    for name, code in zip(names, codes):
        lines.insert(rng.randrange(len(lines)), f"The code of {name} is {code}.\n")
    asked = rng.randrange(CODES_PER_PROMPT)
    return Needle(file, f"{''.join(lines)}\nRecall: the code of {names[asked]} is", codes[asked])
