"""The panel of segments in Python: what a chain of layers with checkpoints holds."""


def held(layers: int, segment: int, ratio: int) -> list[int]:
    """What is held at each moment, in checkpoints (the input of one layer).

    segment: layers between two checkpoints; 0 keeps everything. ratio: what a layer keeps for its
    backward, its input included, in checkpoints.

    A moment is one layer's forward, its second forward, or its backward. Gradients on their way
    and what an operation takes for itself are not counted.
    """
    if not segment:
        up = [n * ratio for n in range(1, layers + 1)]
        return up + up[::-1]
    firsts = range(0, layers, segment)
    # forward: one layer beside the checkpoints; the first of a segment has its checkpoint as input
    moments = [n // segment + ratio + (n % segment > 0) for n in range(layers)]
    for number, first in reversed(list(enumerate(firsts))):
        up = [number + n * ratio for n in range(1, min(segment, layers - first) + 1)]
        moments += up + up[::-1]
    return moments


def figures(layers: int, segment: int, ratio: int) -> dict[str, float]:
    """What the panel says: peak, forward, everything, passes and best.

    peak, everything: the most held, so and with everything kept; forward: when forward has ended,
    and its last layer is gone. passes: work in forward passes, a backward being two. best: the
    segment with the lowest peak, the shortest of equal ones.
    """
    segment = min(segment, layers)
    return {
        "peak": max(held(layers, segment, ratio)),
        "forward": -(-layers // segment) if segment else layers * ratio,
        "everything": layers * ratio,
        "passes": 4 if segment else 3,
        "best": min(range(1, layers + 1), key=lambda k: max(held(layers, k, ratio))),
    }
