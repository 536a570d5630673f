"""What ranks send each other in a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlab.card.links import CARDS

if TYPE_CHECKING:
    import torch
    from torch._ops import OpOverload

# Collectives in which a rank keeps the part of its own.
IN_PARTS = set(
    "allgather_ _allgather_base_ reduce_scatter_ _reduce_scatter_base_ alltoall_base_ "
    "all_gather_into_tensor reduce_scatter_tensor all_to_all_single".split()
)

NOTHING = ("wait_tensor", "wait_tensors", "barrier", "monitored_barrier_")  # is sent by these


def share(collective: str, ranks: int) -> float:
    """What a rank sends at least for every byte of the larger tensor, by an operator's name.

    NVIDIA/nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth", the same for a ring and for a tree. Of
    one that is not listed, as a broadcast or of one rank to another, all counts.
    """
    if collective in ("allreduce_", "all_reduce"):
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in IN_PARTS else 1.0


def sent_bytes(
    func: OpOverload, args: tuple, tensors: list[torch.Tensor], out: Any
) -> tuple[int, int] | None:
    """(bytes that a rank sends in a collective, cards of its machine in the group).

    None for any other operator. tensors: all that it was given. out: what it gives, which a
    functional collective makes. The cards are as in `memlab.card.links.link_rate`.
    """
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    import torch.distributed as dist

    from memlab.trace.tensors import tensors_in

    if func._opname in NOTHING:
        return 0, CARDS
    if func.namespace == "c10d":
        box: Any = next(arg for arg in args if type(arg).__name__ == "ScriptObject")
        group = dist.ProcessGroup.unbox(box)
        nbytes = [tensor.nbytes for tensor in tensors]
        each = func._opname in ("allreduce_", "broadcast_")  # of a list is sent
        largest = sum(nbytes) if each else max(nbytes, default=0)
    else:
        name: Any = next(arg for arg in reversed(args) if isinstance(arg, str))
        group = dist.distributed_c10d._resolve_process_group(name)
        largest = max(tensor.nbytes for tensor in (*tensors, *tensors_in([out])))
    return round(largest * share(func._opname, group.size())), _cards(group)


def is_waited_for(func: OpOverload, args: tuple, stream: int) -> bool:
    """Whether the kernels after a collective wait for it, so that none of its time is hidden.

    Tensor parallelism sums or gathers what the next operator reads: DTensor by functional
    collectives, which `wait_tensor` follows at first use; others by a call that is not async_op in
    the kernels' own stream. DistributedDataParallel's are async_op, fully_shard's have streams of
    their own. stream: the number of the one at work, 0 for the default one.
    """
    if func.namespace == "_c10d_functional":
        return True
    return stream == 0 and not named(func, args).get("async_op", True)


def named(func: OpOverload, args: tuple) -> dict[str, Any]:
    """An operator's positional arguments by their names."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False))


def _cards(group: Any) -> int:
    """How many of the first machine's cards are in a group; 0 where it has no others.

    A group of all ranks counts as one of whole machines: ranks may be fewer than their cards.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    here = sum(rank < CARDS for rank in ranks)
    if len(ranks) == dist.get_world_size():
        return CARDS
    return 0 if here == len(ranks) else here
