"""Launches are dependent ones where the device has them."""

import pytest
import torch

from dsa_compile.lowering.dependent import launch_options

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _other_devices():
    launch_options.cache_clear()
    yield
    launch_options.cache_clear()


@pytest.mark.parametrize(("capability", "there"), [((9, 0), True), ((10, 0), True), ((8, 9), False)])
def test_what_a_device_has_decides(capability, there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch_options(CUDA) == ({"DEPENDENT": True, "launch_pdl": True} if there else {"DEPENDENT": False})


def test_rocm_and_the_interpreter_have_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert launch_options(CUDA) == launch_options(torch.device("cpu")) == {"DEPENDENT": False}
