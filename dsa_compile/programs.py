"""Graphs that an op runs by name: what a pass cut out of a model's graph to run elsewhere.

A compiled graph holds a name alone, and may come from a cache of an earlier process: the pass that names a program runs
in each process, before what it names is called.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from dsa_compile import compat

_programs: dict[str, GraphModule] = {}
_compiled: dict[str, Callable[..., Any]] = {}


def register(program: GraphModule, inputs: Sequence[Tensor], how: str) -> str:
    """The name of a program of tensors that returns a tuple of one; one name for one text on inputs of one kind.

    ``inputs``: fake ones. ``how`` the graph that will name it is compiled.
    """
    kinds = [(x.dtype, str(x.device), str(tuple(x.shape)), str(x.stride())) for x in inputs]
    name = hashlib.sha256(f"{how} {program.code} {kinds}".encode()).hexdigest()[:16]
    _programs[name] = program
    return name


def named(name: str) -> GraphModule:
    """The program of a name, which a later pass may rewrite before it is compiled."""
    return _programs[name]


def compile_program(name: str, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> None:
    """Let Inductor compile a program while the graph that names it is compiled, for the same sizes.

    ``inputs``: fake ones. ``options``: settings of Inductor.
    """
    _compiled[name] = compat.compile_part(_programs[name], [*inputs], {**options})


def run(name: str, inputs: Sequence[Tensor]) -> Tensor:
    """Run a program.

    Raises:
        RuntimeError: none of this name was registered.
    """
    if name not in _programs:
        raise RuntimeError(
            f"dsa::select_start: expected a program that a pass registered in this process, came {name!r}. Compile the "
            "model here; a graph alone does not hold its programs."
        )
    (output,) = _compiled.get(name, _programs[name])(*inputs)
    return output
