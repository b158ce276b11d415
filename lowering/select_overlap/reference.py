"""Reference of ``dsa::select_start`` and ``dsa::select_wait``: the first does all the work."""

from torch import Tensor

from dsa_compile import programs


def select_start(writes: list[Tensor], gate: Tensor, reads: list[Tensor], program: str, index_topk: int) -> Tensor:
    """What a program returns: topk_indices int32[B, T, K].

    Args:
        writes: tensors that the program changes in place. gate: [B, T, ...], what it reads that was computed last.
        reads: its other inputs. program: its name, see `dsa_compile.programs`; it takes the three in this order.
        index_topk: K.
    """
    return programs.run(program, [*writes, gate, *reads])


def select_wait(topk_indices: Tensor, gate: Tensor, held: list[Tensor]) -> None:
    """Nothing: ``topk_indices``, which `select_start` returned, are there. ``held``: what its program reads.

    ``gate``: what is read behind the wait, and nothing else before it.
    """
