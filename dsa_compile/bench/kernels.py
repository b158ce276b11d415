"""Where the time of a run goes, by the names of the kernels that it launches."""

import re
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

GROUPS = {
    "attention": r"sparse_mla|^attend|^merge|_bits_kernel|^blocks_kernel|fmha|flash",
    "indexer": r"^score|^topk_kernel|^gather_kernel|^choose_kernel|^quantise|^pack_kernel",
    "experts": r"GroupProblemShape|grouped_mm|^expert_kernel",
    "projections": r"^row_kernel|nvjet|gemm|gemv|splitK|cutlass|triton_tem\w*_(b|add)?mm",
}
"""Patterns of kernel names, the first that is found counts. Products of a shared expert are among projections."""
REST = "the rest"


def kernel_times(work: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel that ``work`` runs on the GPU, by name; CUDA graphs are looked into."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in found.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us()
    return times


def by_group(times: Mapping[str, float]) -> dict[str, float]:
    """The same by group of `GROUPS`, and `REST`."""
    sums = dict.fromkeys([*GROUPS, REST], 0.0)
    for name, us in times.items():
        sums[next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), REST)] += us
    return sums
