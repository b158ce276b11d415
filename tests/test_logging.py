"""Numbered graphs before and after each pass, with the change in operator counts."""

import os
import subprocess
import sys

CODE = """
import torch, dsa_compile
from dsa_compile.models.miniature import miniature
model = dsa_compile.optimize(miniature("deepseek_v32"), lowering="eager")
with torch.no_grad():
    model(torch.ones(1, 20, dtype=torch.long), use_cache=False)
"""


def test_torch_logs_prints_graphs_and_differences(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=tmp_path,
        env=os.environ | {"TORCH_LOGS": "+dsa_compile"},
        capture_output=True,
        text=True,
        check=True,
    )
    for text in ("00 raise_mla before", "06 choose_form after", "dsa.prefill_mla.default: +3", "dsa.mla.default: -3"):
        assert text in done.stderr
