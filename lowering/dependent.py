"""Launches that are set up while their predecessor ends (programmatic dependent launch).

In a CUDA graph on an H200 a kernel then starts up to 0.3 us sooner, and where a second stream delays plain launches,
0.4 us; see ``docs/plans.md``.
"""

from functools import cache

import torch

CAPABILITY = (9, 0)
"""The first that has them."""


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """What a launch takes of a kernel with the compile-time argument DEPENDENT, on a device.

    Such a kernel waits for its predecessor before it reads or writes anything, so that all that ran before has ended
    for whoever waits for it in turn.
    """
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < CAPABILITY:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
