"""Runs PyTorch's distributed code on one simulated GPU, as rank 0 of several.

PyTorch's fake process group (torch/testing/_internal/distributed/fake_pg.py) completes every
collective at once, without other processes. PyTorch's own code (DDP, FSDP2's `fully_shard`,
`ZeroRedundancyOptimizer`) allocates what a rank holds: its shards, the buffers of its collectives,
and the parameters that it gathers.

Known limitations: values that come from other ranks are stand-ins, as all values on the GPU are.
NCCL's own buffers lie outside PyTorch's allocator and are not counted. Pipelines, RPC and
FullyShardedDataParallel are refused.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.rpc
import torch.multiprocessing.spawn
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor, _dispatch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from memlab.card import cuda_api
from memlab.card.calls import Call
from memlab.card.card_mode import CardMode
from memlab.card.placement import PLACE, NotSimulated
from memlab.fields import integer_from
from memlab.trace.patches import replaced

# Name -> why it is refused, or what to do instead.
NOT_SIMULATED = {
    "torch.distributed.fsdp.FullyShardedDataParallel": "use fully_shard, its successor",
    "torch.distributed.rpc.init_rpc": "a rank of a SimulatedGPU has no other processes to call",
    "torch.distributed.pipelining.PipelineStage": "all stages of a model are on each rank",
}


def check_ranks(ranks) -> int:
    """Return the number of ranks, a whole number from 1.

    Raises ValueError for any other value, and for several ranks in a process that is already a rank
    of a real group.
    """
    integer_from(1)("ranks", ranks)
    if ranks > 1 and dist.is_available() and dist.is_initialized():
        raise ValueError(
            f"ranks is {ranks}, and this process is rank {dist.get_rank()} of a group of "
            f"{dist.get_world_size()} already: call torch.distributed.destroy_process_group() first"
        )
    return ranks


def torchrun_environment(ranks: int) -> dict[str, str]:
    """The environment variables that torchrun sets for the first of `ranks` processes."""
    first = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"), "0")
    size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return first | size | {"MASTER_ADDR": "localhost"}


@contextlib.contextmanager
def fake_group(ranks: int):
    """Let `torch.distributed` start a fake group of `ranks` ranks; this process is rank 0.

    Whichever backend is requested, PyTorch's fake one is used. With several ranks, torchrun's
    environment variables are set. A group that the code leaves open is destroyed after the block.
    """
    start = functools.partial(_start, ranks)
    rows = (
        # Modules that have imported a function are patched one by one.
        *((m, "init_process_group", start) for m in (dist, distributed_c10d, device_mesh)),
        (distributed_c10d, "_new_process_group_helper", _fake_backend),
        *((m, name, f) for m in (dist, distributed_c10d) for name, f in OBJECTS.items()),
        *((module, name, functools.partial(_spawn, ranks)) for module, name in SPAWNS),
    )
    environment = torchrun_environment(ranks) if ranks > 1 else {}
    with mock.patch.dict(os.environ, environment), replaced(*rows):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _start(ranks, backend=None, *args, rank=-1, world_size=-1, **settings):
    """`torch.distributed.init_process_group`; raises NotSimulated for another rank or size."""
    if world_size not in (-1, ranks) or rank not in (-1, 0):
        raise NotSimulated(
            f"init_process_group asks for rank {rank} of {world_size}: this is rank 0 of {ranks}, "
            "the ranks of SimulatedGPU"
        )
    if world_size == -1 and "WORLD_SIZE" not in os.environ:
        raise NotSimulated(
            "init_process_group got no world_size, and no torchrun has set WORLD_SIZE: give "
            "SimulatedGPU ranks=N, or memlab run --ranks N"
        )
    _init("fake", store=FakeStore(), rank=0, world_size=ranks)


def _spawn(ranks, function, args=(), nprocs=1, join=True, *settings, **more):
    """`torch.multiprocessing.spawn`: runs the first process only, inside this one.

    Raises NotSimulated for another number of processes than of ranks.
    """
    if nprocs != ranks:
        raise NotSimulated(
            f"torch.multiprocessing.spawn asks for {nprocs} processes: this is the first of "
            f"{ranks}. Give SimulatedGPU ranks={nprocs}, or memlab run --ranks {nprocs}"
        )
    function(0, *args)
    return None if join else SimpleNamespace(join=lambda *args, **kwargs: True, processes=[])


# The functions under all their names. `torch.multiprocessing.spawn` is a function, which hides the
# module of that name; sys.modules still has the module.
SPAWNS = [
    (torch.multiprocessing, "spawn"),
    (torch.multiprocessing, "start_processes"),
    (sys.modules["torch.multiprocessing.spawn"], "start_processes"),
]


_init = dist.init_process_group
_new_group = distributed_c10d._new_process_group_helper


def _fake_backend(size, rank, ranks, backend, store, *args, **settings):
    """`_new_process_group_helper` with the fake backend, for subgroups of the ranks too."""
    settings.pop("backend_options", None)
    return _new_group(size, rank, ranks, dist.Backend("fake"), store, *args, **settings)


def _all_gather_object(object_list, obj, group=None):
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj, object_gather_list=None, *args, **kwargs):
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list, scatter_object_input_list=None, *args, **kwargs
):
    scatter_object_output_list[:1] = scatter_object_input_list[:1]


# Collectives of Python objects, which would pickle and exchange them. Every other rank is taken to
# send what this one has.
OBJECTS = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": lambda *args, **kwargs: None,
}


@contextlib.contextmanager
def rank_of(mode: CardMode, ranks: int):
    """Let the code inside be rank 0 of `ranks` on a simulated GPU."""
    if dist.is_initialized():  # a rank of a real group, which simulates its own GPU
        yield
        return
    with fake_group(ranks):
        rows = (
            *cuda_api.refusals(NOT_SIMULATED),
            (dist, "Reducer", _reducer_on_the_card(mode.calls)),
            # torch.distributed asks for it where code names no device type.
            (torch._C, "_get_accelerator", lambda check=None: torch.device("cuda")),
            (ShardingPropagator, _SHAPES, _unseen(mode.fake, getattr(ShardingPropagator, _SHAPES))),
            (_dispatch, "run_dtensor_rng_op", _drawn),
            # torch.distributed.checkpoint saves this rank's shards only, as a single process would.
            (_DistWrapper, "__init__", _of_one_process),
            (default_planner, "_validate_global_plan", _without_parts),
            *((DTensor, name, answer) for name, answer in PLACE.items()),
        )
        with replaced(*rows, create=True):
            yield


_original_wrapper, _original_check = _DistWrapper.__init__, default_planner._validate_global_plan


def _of_one_process(self, group, use_dist, coordinator_rank):
    # use_dist=False: the plans of other ranks are not gathered.
    _original_wrapper(self, group, False, coordinator_rank)


def _without_parts(plan, metadata):
    # The original checks that the shards in a plan cover each tensor, which one rank's do not.
    return _original_check(plan, dataclasses.replace(metadata, state_dict_metadata={}))


_SHAPES = "_propagate_tensor_meta_non_cached"


def _drawn(before, after, operator, *args, **kwargs):
    """`run_dtensor_rng_op` without the generator's state, since drawn numbers have no value."""
    return operator(*args, **kwargs)


def _unseen(fake, shapes):
    """DTensor's propagation of shapes, on fake tensors that the tracer does not see.

    To learn a result's shape, DTensor runs each operator once on tensors of the global shape, which
    must not count as memory.
    """

    def run(*args):
        with _disable_current_modes(), fake:
            return shapes(*args)

    return run


def _reducer_on_the_card(calls):
    """DDP's reducer, whose C++ code allocates the gradient buckets on the parameters' device.

    To C++, that device is the CPU. So the constructor runs as a call with the parameters as its
    arguments, which places new tensors on the GPU (`memlab.card.calls`). Its int32 tensors, which
    map parameters to buckets, belong to the host.
    """

    class Reducer(dist.Reducer):
        def __init__(self, parameters, *args, **kwargs):
            self._beside = Call((parameters,), {}, host_dtype=torch.int32)
            with calls.at_work(self._beside):
                super().__init__(parameters, *args, **kwargs)

        def _rebuild_buckets(self):
            with calls.at_work(self._beside):
                return super()._rebuild_buckets()

    return Reducer
