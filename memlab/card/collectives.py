"""The bytes that a rank sends in a collective, the GPUs in its group, and whether kernels wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlab.card.links import CARDS

if TYPE_CHECKING:
    import torch
    from torch._ops import OpOverload

# Collectives in which a rank sends all parts but its own.
IN_PARTS = set(
    "allgather_ _allgather_base_ reduce_scatter_ _reduce_scatter_base_ alltoall_base_ "
    "all_gather_into_tensor reduce_scatter_tensor all_to_all_single".split()
)

# Operators of the collectives' namespaces that send nothing.
NOTHING = ("wait_tensor", "wait_tensors", "barrier", "monitored_barrier_")


def share(collective: str, ranks: int) -> float:
    """The least a rank sends, per byte of the larger tensor, in a collective of this name.

    NVIDIA/nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth"; rings and trees are equal. Any other
    operator, such as a broadcast or a send from one rank to another, counts in full.
    """
    # All-reduce: a reduce-scatter, then an all-gather.
    if collective in ("allreduce_", "all_reduce"):
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in IN_PARTS else 1.0


def sent_bytes(
    func: OpOverload, args: tuple, tensors: list[torch.Tensor], out: Any
) -> tuple[int, int] | None:
    """(bytes that a rank sends, GPUs of its machine in the group); None for other operators.

    The number of GPUs is meant as in `memlab.card.links.link_rate`. tensors: all tensors among the
    arguments. out: the result, which functional collectives allocate.
    """
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    import torch.distributed as dist

    from memlab.trace.tensors import tensors_in

    if func._opname in NOTHING:
        return 0, CARDS
    if func.namespace == "c10d":
        # c10d: the group is a boxed argument, and inputs and outputs are both arguments.
        box: Any = next(arg for arg in args if type(arg).__name__ == "ScriptObject")
        group = dist.ProcessGroup.unbox(box)
        nbytes = [tensor.nbytes for tensor in tensors]
        # These two take a list and send every tensor of it. The others have an input and an output,
        # of which the larger is the whole.
        each = func._opname in ("allreduce_", "broadcast_")
        largest = sum(nbytes) if each else max(nbytes, default=0)
    else:
        # _c10d_functional: the group's name is the last string; before it may be the reduction's.
        name: Any = next(arg for arg in reversed(args) if isinstance(arg, str))
        group = dist.distributed_c10d._resolve_process_group(name)
        largest = max(tensor.nbytes for tensor in (*tensors, *tensors_in([out])))
    return round(largest * share(func._opname, group.size())), _cards(group)


def is_waited_for(func: OpOverload, args: tuple, stream: int) -> bool:
    """Whether the kernels after a collective wait for it, so that none of its time is hidden.

    Tensor parallelism sums or gathers what the next operator reads. DTensor does so by functional
    collectives, with a `wait_tensor` at the first use. Other code calls a collective in the default
    stream without async_op. Those of DistributedDataParallel are async_op, and those of
    `fully_shard` run in streams of their own. stream: the number of the current stream, 0 for the
    default one.
    """
    if func.namespace == "_c10d_functional":
        return True
    return stream == 0 and not named(func, args).get("async_op", True)


def named(func: OpOverload, args: tuple) -> dict[str, Any]:
    """An operator's positional arguments by the names of its schema."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False))


def _cards(group: Any) -> int:
    """How many GPUs of the first machine are in a group; 0 if the group has no other GPUs.

    A group of all ranks counts as a group of whole machines, even if there are fewer ranks than
    GPUs in a machine.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    here = sum(rank < CARDS for rank in ranks)
    if len(ranks) == dist.get_world_size():
        return CARDS
    return 0 if here == len(ranks) else here
