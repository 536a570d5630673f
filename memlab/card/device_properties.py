"""What the card's properties are, and what a build of PyTorch with CUDA says of itself."""

import contextlib
import types
import uuid

import torch

ARCHITECTURES = (70, 75, 80, 86, 90, 100, 120)  # that the wheels are built for
# KiB of shared memory of a multiprocessor, 100 but for these: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability". A block gets 48 of them on Pascal, all of them
# on Volta and Turing, and all but one since Ampere.
SHARED = {(6, 0): 64, (6, 1): 96, (7, 0): 96, (7, 5): 64, (8, 0): 164}
SHARED |= dict.fromkeys(((9, 0), (10, 0), (10, 3)), 228)


def answers(gpu) -> list[tuple[object, dict]]:
    """(module, {name: its answer}) of a build for a card, `memlab.gpus.GPU`.

    The versions are those of a recent build that has the card's class: CUDA 13 has none before 7.5.
    """
    volta = gpu.capability is not None and tuple(gpu.capability) < (7, 5)
    architectures = [n for n in ARCHITECTURES if volta or n >= 75]
    yes = {"is_available": lambda *args: True}
    nccl = {"is_nccl_available": lambda: True}
    return [
        (torch.version, {"cuda": "12.6" if volta else "13.0"}),
        (torch.backends.cuda, {"is_built": lambda: True}),
        (torch.backends.cudnn, yes | {"version": lambda: 91002}),
        (torch.cuda.nccl, yes | {"version": lambda: (2, 27, 7)}),
        # NVTX's marks, which a profiler would show.
        (torch.cuda.nvtx, {"_nvtx": _done("rangePushA rangePop rangeStartA rangeEnd markA")}),
        (torch.autograd.profiler, {"emit_nvtx": lambda *args, **kwargs: contextlib.nullcontext()}),
        (torch.distributed, nccl),
        (torch.distributed.distributed_c10d, nccl),
        (
            torch._C,
            {
                "_cuda_getArchFlags": lambda: " ".join(f"sm_{n}" for n in architectures),
                "_cuda_canDeviceAccessPeer": lambda device, other: device != other,
            },
        ),
    ]


def runtime(free_and_total):
    """What `torch.cuda.cudart()` gives: CUDA's runtime, of which all succeeds."""
    return _done(
        "cudaProfilerStart cudaProfilerStop cudaHostRegister cudaHostUnregister cudaStreamCreate "
        "cudaStreamDestroy",
        cudaError=types.SimpleNamespace(success=0),
        cudaMemGetInfo=free_and_total,
    )


def _done(calls, **more):
    """A module with these functions, which do nothing and succeed, and with more names."""
    return types.SimpleNamespace(**dict.fromkeys(calls.split(), lambda *args: 0), **more)


class DeviceProperties:
    """What is known of the card: what `torch.cuda.get_device_properties` is asked for."""

    warp_size = 32
    regs_per_multiprocessor = 65536
    max_threads_per_block = 1024
    shared_memory_per_block = 48 * 2**10
    is_integrated = is_multi_gpu_board = 0
    pci_bus_id = pci_device_id = pci_domain_id = 0

    def __init__(self, gpu, memory):
        self._memory = memory
        self.name = gpu.name
        self.gcnArchName = gpu.name  # as builds for CUDA have it
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.processors
        self.uuid = uuid.uuid5(uuid.NAMESPACE_DNS, gpu.name)
        shared = SHARED.get(gpu.capability, 100)
        of_a_block = 48 if self.major < 7 else shared - (self.major > 7)
        self.shared_memory_per_multiprocessor = shared * 2**10
        self.shared_memory_per_block_optin = of_a_block * 2**10
        self.max_threads_per_multi_processor = gpu.threads // gpu.processors

    @property
    def total_memory(self) -> int:
        return self._memory.free_and_total()[1]

    def __repr__(self):
        return f"simulated {self.name}, compute capability {self.major}.{self.minor}"
