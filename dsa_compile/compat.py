"""The only module that touches private names of torch and what differs between its versions (2.11 to 2.13)."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule, Node

RECOMPILE_LIMIT = 64
"""Graphs that one optimized model may hold: lengths, batches, caches and grad modes each make their own."""


def raise_recompile_limit() -> None:
    """Let Dynamo keep `RECOMPILE_LIMIT` graphs per model; its default of 8 is for functions."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * RECOMPILE_LIMIT)


def own_code(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """A copy of ``function`` with a code object of its own: Dynamo counts recompilations per code object.

    ``name``: by which Dynamo remembers what sizes the copy has seen, and makes dynamic those that vary.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=name or function.__name__)
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def hint_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Ask Dynamo to treat a size as dynamic from its first sight."""
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def fixed_address(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, which CUDA graphs then read and write where it lies; for another in its place they record anew."""
    import torch._dynamo

    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


def symbolic_dispatch() -> AbstractContextManager[Any]:
    """While this lasts an op on fake tensors of symbolic sizes is tried in Python first, as Dynamo does.

    In C++ a linear of such tensors under autocast asks for numbers (torch 2.11).
    """
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def constant_of(value: Any) -> float | None:
    """A number as it is, or the float behind a symbol, which Dynamo then guards on; None if only a run knows it."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        return float(value) if isinstance(value, (int, float, torch.SymFloat)) else None
    except GuardOnDataDependentSymNode:
        return None


def unbound_symbols(values: Iterable[Any]) -> set[Any]:
    """Symbols in sizes, strides and offsets of tensors that are no size, or number among ``values``, themselves."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    values = list(values)
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
    return set(free_symbols(values)) - {symbol_of(size) for size in sizes if isinstance(size, torch.SymInt)}


def symbol_of(size: torch.SymInt) -> Any:
    """What a size is in terms of symbols."""
    return size.node.expr


def module_stack(node: Node) -> list[tuple[str, str]]:
    """Modules that a node was traced in, outermost first: (path without the root, class name)."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(_clean_path(path), getattr(cls, "__name__", str(cls))) for path, cls in stack.values()]


@lru_cache(maxsize=8192)  # every node of a deep graph asks
def _clean_path(path: str) -> str:
    """``L['model'].model.layers.1.self_attn`` and its other spellings -> ``model.layers.1.self_attn``."""
    path = re.sub(r"^\w+(\['\w+'\])?", "", path)
    path = path.replace("._modules['", ".").replace("']", "").replace("[", ".").replace("]", "").lstrip(".")
    layer = re.search(r"(?:model\.)?layers\.\d+.*", path)
    return layer[0] if layer else path


def fp8_matmul(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """a [M, K] times the transpose of b [N, K], float8_e4m3fn of float32 ``scale`` [], in bfloat16, at full speed."""
    product: torch.Tensor = torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    return product


def files_hash(paths: Iterable[str]) -> bytes:
    """A hash of the contents of source files."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(tuple(paths))


def identity_pass(uuid: object) -> Any:
    """An Inductor pass that does nothing but put ``uuid`` into the keys of Inductor's caches."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Identity(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            return None

        def uuid(self) -> object:
            return uuid

    return Identity()


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor settings of a ``torch.compile`` mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode else {}


DEPENDENT_LAUNCHES: dict[str, Any] = {"triton.enable_pdl": True}
"""Inductor settings with which its own kernels are set up while their predecessors run, where the device can."""


def without_cuda_graphs(mode: str | None) -> str | None:
    """The mode of ``torch.compile`` that does as this one, but for CUDA graphs."""
    return {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}.get(mode or "", mode)


def compile_fx(gm: GraphModule, example_inputs: list[Any], config_patches: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    with _dependents_wait_first():
        compiled: Any = compile_fx(gm, example_inputs, config_patches=config_patches)
    return compiled


@contextmanager
def _dependents_wait_first() -> Iterator[None]:
    """While this lasts Inductor lets a kernel that is launched as a dependent wait before it touches memory.

    By itself a kernel reads what its predecessor did not write before it waits, and one that reads nothing never
    waits. Such a kernel can end before its predecessor has, and whoever waits for it then reads what is not there yet.
    """
    from torch._inductor.codegen import triton

    kernels: Any = triton.TritonKernel

    def wait_before(kernel: Any, buffer: Any, *_: Any, **__: Any) -> None:
        if kernel._enable_pdl_codegen():
            looped = kernel.inside_reduction and kernel.range_trees[-1].is_loop
            (kernel.body if looped else buffer).writeline(kernel.GDC_WAIT)

    own = kernels._handle_pdl_before_access
    kernels._handle_pdl_before_access = wait_before
    try:
        yield
    finally:
        kernels._handle_pdl_before_access = own


def compile_part(gm: GraphModule, example_inputs: list[Any], config_patches: dict[str, Any]) -> Callable[..., Any]:
    """Compile a graph that another runs, while that other is compiled. What it returns has no gradient."""
    from torch._guards import TracingContext, detect_fake_mode, tracing

    with torch.no_grad(), tracing(TracingContext(detect_fake_mode(example_inputs))):
        return compile_fx(gm, example_inputs, config_patches)


def register_lowering(op: Any, lower: Callable[..., Any]) -> None:
    """Let Inductor turn ``op`` into what ``lower`` makes of its IR."""
    from torch._inductor.lowering import register_lowering

    register_lowering(op, type_promotion_kind=None)(lower)


def fallback(op: Any, *args: Any) -> Any:
    """IR that calls ``op`` as it stands."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(op, add_to_fallback_set=False)(*args)


def hint(size: Any) -> int:
    """A size of IR as the number that was seen at capture; no guard."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size))


def known_below(size: Any, bound: int) -> bool:
    """Whether a size of IR is smaller on every run of the graph."""
    from torch._inductor.virtualized import V

    return bool(V.graph.sizevars.statically_known_lt(size, bound))


def empty_buffer(size: list[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """IR of an uninitialised contiguous tensor."""
    from torch._inductor.lowering import empty_strided

    return empty_strided(size, None, dtype=dtype, device=device)


def rows_in_memory(x: Any) -> Any:
    """``x`` as a buffer whose layout is fixed and whose last dimension is contiguous."""
    from torch._inductor.ir import ExternKernel
    from torch._inductor.virtualized import V

    x = ExternKernel.realize_input(x)
    x.freeze_layout()
    return x if V.graph.sizevars.statically_known_equals(x.get_stride()[-1], 1) else contiguous(x)


def contiguous(x: Any) -> Any:
    from torch._inductor.ir import ExternKernel

    return ExternKernel.require_contiguous(ExternKernel.realize_input(x))


def triton_template(name: str, grid: Callable[..., Any], source: str) -> Any:
    """An Inductor template from Triton source; names are global, so the same name is made once."""
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    made = TritonTemplate.all_templates.get(name)
    return made or TritonTemplate(name=name, grid=SymbolicGridFn(grid), source=source)


def autotuned(
    name: str,
    template: Any,
    choices: list[dict[str, Any]],
    inputs: list[Any],
    *,
    size: list[Any],
    dtype: torch.dtype,
    grid_sizes: list[Any],
    mutated: list[Any],
    examples: dict[int, Callable[[Any], torch.Tensor]],
) -> Any:
    """IR of the output of ``template`` in the fastest of ``choices``.

    Args:
        choices: compile-time arguments of each. inputs: buffers, in the order of the template's ``def_kernel``.
        size, dtype: of the contiguous output. grid_sizes: what the template's grid gets first.
        mutated: inputs that the template writes. examples: by place, what autotuning feeds inputs of indices.
    """
    from torch._inductor.ir import FixedLayout, FlexibleLayout
    from torch._inductor.select_algorithm import autotune_select_algorithm

    layout = FixedLayout(inputs[0].get_device(), dtype, size, FlexibleLayout.contiguous_strides(size))
    made: list[Any] = []
    for choice in choices:
        error = template.maybe_append_choice(
            made, input_nodes=inputs, layout=layout, mutated_inputs=mutated, call_sizes=grid_sizes, **choice
        )
        if error is not None:
            raise error
    picked = autotune_select_algorithm(name, made, inputs, layout, input_gen_fns=examples)
    return picked[0] if isinstance(picked, tuple) else picked  # a node before 2.12, with its choice since
