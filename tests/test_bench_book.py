"""``dsa-compile bench book``: what a run says goes into the lab book, and nothing else changes."""

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsa_compile.bench import book
from dsa_compile.cli import app

PAGE = """# Lab book

<!-- bench: doubling, us -->
| case | gate | goal | ours | peer | elsewhere |
|---|---|---|---|---|---|
| `small` | 15 | 10 | 13.0 | 17.0 | 11.5 |
| `large` | 300 | 250 | **290** | | 260 |
| `off` | | | | | |

<!-- bench: doubling, tflops -->
| case | ours |
|---|---|
| `large` | 1 |

<!-- bench: halving, us -->
| case | ours |
|---|---|
| `small` | 5.0 |
"""
FIGURES = {
    "title": "doubling",
    "cases": [
        {"case": "small", "peer": None, "us": 12.34, "tflops": 9.0, "met": True},
        {"case": "small", "peer": "peer", "us": 16.0, "tflops": 9.0},
        {"case": "large", "peer": None, "us": 1234.5, "tflops": 512.6, "met": False},
        {"case": "large", "peer": "peer", "refused": "too large"},
        {"case": "off", "peer": None, "met": False},
    ],
}


@pytest.fixture
def filled(tmp_path):
    """Fill PAGE with figures, and give what came of it."""
    page = tmp_path / "kernels.md"
    page.write_text(PAGE)

    def run(*figures):
        paths = [tmp_path / f"{i}.json" for i in range(len(figures))]
        for path, text in zip(paths, figures):
            path.write_text(json.dumps(text))
        result = CliRunner().invoke(app, ["bench", "book", *map(str, paths), "--page", str(page)])
        return result, page.read_text()

    return run


def test_cells_of_ours_and_of_peers_are_filled_and_all_else_stays(filled):
    result, text = filled(FIGURES)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("6 cells")
    changes = {
        "| `small` | 15 | 10 | 13.0 | 17.0 | 11.5 |": "| `small` | 15 | 10 | **12.3** | 16.0 | 11.5 |",
        "| `large` | 300 | 250 | **290** | | 260 |": "| `large` | 300 | 250 | 1,234 | refused | 260 |",
        "| `off` | | | | | |": "| `off` |  |  | wrong |  |  |",
        "| `large` | 1 |": "| `large` | 513 |",
    }
    want = PAGE
    for before, after in changes.items():
        want = want.replace(before, after)
    assert text == want
    assert filled(FIGURES, {"title": "halving", "cases": [{"case": "small", "peer": None, "us": 4.0}]})[1] == (
        want.replace("| 5.0 |", "| 4.0 |")
    )


def test_what_is_no_figures_and_what_has_no_place_is_refused(filled):
    for figures, said in (
        ({"rows": []}, "expected a file that a benchmark of kernels wrote by --out"),
        ({"title": "doubling", "cases": [{"case": "huge", "peer": None}]}, "with a title and a case of"),
    ):
        result, text = filled(figures)
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
        assert text == PAGE


def test_the_lab_book_names_cases_that_there_are_and_their_gates():
    gates, unit = {}, {"us": "us", "tflops": "TFLOP/s"}
    for name in ("attention", "indexer", "topk", "select"):
        module = importlib.import_module(f"dsa_compile.bench.{name}")
        title = {"attention": "sparse MLA attention", "indexer": "index scores", "topk": "top-k of index scores"}
        for case in module.CASES:
            for target in case.targets:
                gates[title.get(name, "selection of tokens"), case.name, target.unit] = target.bound
    lines = (Path(__file__).parents[1] / "docs/kernels.md").read_text().split("\n")
    rows = 0
    for i, line in enumerate(lines):
        if mark := book.MARK.fullmatch(line):
            for row in lines[i + 3 : lines.index("", i)]:
                case, gate = [cell.strip() for cell in row.split("|")[1:3]]
                assert gates[mark[1], case.strip("`"), unit[mark[2]]] == float(gate.replace(",", ""))
                rows += 1
    assert rows == 33
