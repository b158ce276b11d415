"""Every example runs and says what it promises."""

import shutil
import subprocess
import sys

import pytest

EXAMPLES = {
    "optimize_and_generate.py": (["--lowering", "eager"], ["7629", "cache: 3,840 bytes per token"]),
    "explain_model.py": ([], ["deepseek_v32: 2112 -> 672 cache bytes per token"]),
    "backend_string.py": ([], ["dense over latents", "sparse, 8 of 40 keys"]),
    "write_a_pass.py": ([], ["8 -> 4 keys", "logits moved by"]),
    "warm_up.py": (["--out", ".", "--steps", "1", "--tokens", "390"], ["divergences:"]),
    "demo.py": (
        ["--prompts", "2", "--tokens", "400", "--lowering", "eager"],
        ["2 of 2", "cache bytes/token", "sparsify"],
    ),
}


@pytest.fixture(scope="session")
def folder(pytestconfig):
    return pytestconfig.rootpath / "examples"


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, folder, tmp_path):
    arguments, expected = EXAMPLES[name]
    shutil.copy(folder / "tinyseek-4m" / "config.json", tmp_path)  # a checkpoint to put indexers beside
    done = subprocess.run(
        [sys.executable, str(folder / name), *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for text in expected:
        assert text in done.stdout


def test_all_examples_are_tested_and_short(folder):
    files = sorted(p.name for p in folder.glob("*.py"))
    assert files == sorted(EXAMPLES)
    for name in files:
        assert len((folder / name).read_text().splitlines()) < 80
