"""How much faster a decode step can become by running fewer indexers (IndexCache), or by hiding them (MLI).

Amdahl's law: all that an indexer trick can gain is the indexers' share of the time.
"""


def sharing_speedup(share: float, retention: float) -> float:
    """Of a step of which indexers take ``share``, when ``retention`` of the layers still run theirs."""
    return 1 / (1 - share * (1 - retention))


def hiding_ceiling(share: float) -> float:
    """Of the same step when every indexer runs entirely beside something else: no plan can exceed it."""
    return sharing_speedup(share, 0)


def overlap_ceiling(first: float, second: float) -> float:
    """Of two kernels of these times that run beside each other instead of in turn, neither slowing the other."""
    return (first + second) / max(first, second)
