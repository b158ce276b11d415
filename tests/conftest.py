"""Fixtures of all tests: one device, one seed, a fresh Dynamo, float32 that is float32."""

import os

import hypothesis
import pytest
import torch

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False

hypothesis.settings.register_profile("local", deadline=None, max_examples=20)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def graphs(monkeypatch) -> list[torch.fx.GraphModule]:
    """Every graph that the backend rewrote, as the passes left it."""
    import dsa_compile.backend

    seen: list[torch.fx.GraphModule] = []

    def record(gm, config):
        report = rewrite(gm, config)
        seen.append(gm)
        return report

    rewrite = dsa_compile.backend.rewrite
    monkeypatch.setattr(dsa_compile.backend, "rewrite", record)
    return seen


@pytest.fixture
def allow_tf32():
    """Lets products of float32 run in TF32, or not, until the test ends."""

    def allow(allowed: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = allowed

    yield allow
    allow(False)


@pytest.fixture(autouse=True)
def _fresh(request):
    """Tests marked ``shared_graphs`` keep what others of their module compiled."""
    torch.manual_seed(0)
    yield
    if not request.node.get_closest_marker("shared_graphs"):
        torch._dynamo.reset()
