"""The ``torch.compile`` backend ``"dsa"``: rewrite a captured graph, then hand it to Inductor."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import _BACKENDS, register_backend
from torch.fx import Graph, GraphModule

import dsa_compile.lowering
from dsa_compile import compat, programs, report
from dsa_compile.bodies import compile_bodies
from dsa_compile.config import DSAConfig
from dsa_compile.passes.base import arguments, is_dsa_op, is_op, target_name, value_of
from dsa_compile.passes.overlap_indexer import MOST_QUERIES, started_programs
from dsa_compile.passes.pipeline import rewrite


def dsa_backend(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Backend function of ``torch.compile(model, backend="dsa", options={...})``.

    Args:
        gm: the graph that Dynamo captured; rewritten in place.
        example_inputs: its inputs.
        options: fields of `DSAConfig` that shape a graph (``DSAConfig.graph_options``).
        mode: a mode of ``torch.compile``.

    Raises:
        ConfigError: an option is unknown or out of range.
    """
    config = DSAConfig.of(**{**(options or {}), **({"mode": mode} if mode else {})})
    result = rewrite(gm, config)
    report.record(result)
    if not any(is_dsa_op(node) for node in gm.graph.nodes):
        reason = "; ".join(dict.fromkeys(e.reason for e in result.entries if not e.matched))
        warnings.warn(
            "dsa: nothing was rewritten, the graph is compiled as Inductor would. "
            + (reason or "It has no attention whose keys and values come from kv_b_proj (MLA)."),
            stacklevel=2,
        )
    if config.lowering == "eager":
        return gm.forward
    dsa_compile.lowering.register_inductor()
    options = _mode_options(gm.graph, config.mode)
    if of_few_rows(gm.graph) and any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        options |= compat.DEPENDENT_LAUNCHES
    for name, inputs in started_programs(gm.graph).items():
        programs.compile_program(name, inputs, options | {"triton.cudagraphs": False})  # a part of the graph's own
    options["post_grad_custom_post_pass"] = compat.identity_pass(cache_key(config))
    if not torch.is_grad_enabled() and not options.get("triton.cudagraphs"):
        parts = compile_bodies(gm, lambda program, inputs: compat.compile_part(program, inputs, options))
        if parts is not None:
            result.notes.append(f"{parts.count} bodies run, {parts.compiled} of them compiled")
            result.bodies = parts.compiled
            return parts.module.forward
    return compat.compile_fx(gm, example_inputs, options)


def _mode_options(graph: Graph, mode: str | None) -> dict[str, Any]:
    """Inductor settings of a mode, without CUDA graphs for what they cannot replay.

    A prompt is not replayed, as each length would be recorded anew; nor is an operator that waits for the device.
    """
    options = compat.mode_options(mode)
    if not options.get("triton.cudagraphs"):
        return options
    rows = (value_of(node) for node in graph.nodes if is_op(node, "mla", "sparse_mla", "prefill_mla"))
    prompt = any(isinstance((x[0] if isinstance(x, tuple) else x).shape[1], torch.SymInt) for x in rows)
    waits = any(target_name(node).startswith("grouped_mm_fallback") for node in graph.nodes)
    if waits and not prompt:
        warnings.warn(
            f"mode={mode!r}: a graph runs without CUDA graphs, as the experts' grouped_mm waits for the device in "
            "dtypes other than bfloat16. Call model.set_experts_implementation('batched_mm').",
            stacklevel=2,
        )
    return options | {"triton.cudagraphs": not (prompt or waits)}


def of_few_rows(graph: Graph) -> bool:
    """Whether a graph decodes or verifies: its kernels are so short that their starts count."""
    rows = [value_of(arguments(n)["slots"]).shape[1] for n in graph.nodes if is_op(n, "cache_write")]
    return bool(rows) and all(isinstance(T, int) and T <= MOST_QUERIES for T in rows)


def cache_key(config: DSAConfig) -> tuple[bytes, str]:
    """What Inductor's caches must tell apart: the sources of what shapes a graph's code, and the options."""
    root = Path(dsa_compile.__file__).parent
    sources = [p for folder in ("passes", "lowering") for p in sorted((root / folder).rglob("*"))]
    files = [str(p) for p in (root / "compat.py", *sources) if p.suffix in (".py", ".jinja")]
    return compat.files_hash(files), repr(sorted(config.graph_options().items()))


if "dsa" not in _BACKENDS:
    register_backend(dsa_backend, name="dsa")
