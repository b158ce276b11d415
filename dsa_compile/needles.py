"""Long prompts with planted codes; the text is the Python standard library's source, so that every machine has it."""

import itertools
import random
import sysconfig
from collections.abc import Callable, Iterator
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
    """Prompts that go around `MODULES`, each of at least ``tokens``; ``count`` counts the tokens of a text."""
    rng = random.Random(0)
    return [make_needle(place % len(MODULES), tokens, count, rng) for place in range(prompts)]


def make_needle(module: int, tokens: int, count: Callable[[str], int], rng: random.Random) -> Needle:
    """Source from the start of a module on, cut behind ``tokens``, with codes planted, and a question for one."""
    lines: list[str] = []
    for line in _source(module):
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
    return Needle(f"{MODULES[module]}.py", f"{''.join(lines)}\nRecall: the code of {names[asked]} is", codes[asked])


def _source(module: int) -> Iterator[str]:
    """The lines of a module and then of those behind it, around and around."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in itertools.cycle(MODULES[module:] + MODULES[:module]):
        yield from (library / f"{name}.py").read_text(encoding="utf-8").splitlines(keepends=True)
