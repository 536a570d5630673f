"""The properties of the simulated GPU, and what a CUDA build of PyTorch says about itself.

On a machine without CUDA, PyTorch answers that it was built without CUDA, cuDNN or NCCL. The tables
here hold the answers of a CUDA build; `memlab.card.cuda_api` installs them.
"""

import contextlib
import types
import uuid

import torch

ARCHITECTURES = (70, 75, 80, 86, 90, 100, 120)  # compute capabilities that the wheels contain
# Compute capability -> KiB of shared memory per multiprocessor, if not 100: CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability". A thread block can have 48 KiB of them
# on Pascal, all on Volta and Turing, and all but 1 KiB since Ampere.
SHARED = {(6, 0): 64, (6, 1): 96, (7, 0): 96, (7, 5): 64, (8, 0): 164}
SHARED |= dict.fromkeys(((9, 0), (10, 0), (10, 3)), 228)


def answers(gpu) -> list[tuple[object, dict]]:
    """(module, {name: replacement}) rows for a CUDA build on a `memlab.gpus.GPU`.

    The versions are those of a recent build that supports the GPU. CUDA 13 supports none before
    compute capability 7.5, so older GPUs get a build for CUDA 12.6.
    """
    is_old = tuple(gpu.capability) < (7, 5)  # Pascal and Volta
    architectures = [n for n in ARCHITECTURES if is_old or n >= 75]
    yes = {"is_available": lambda *args: True}
    nccl = {"is_nccl_available": lambda: True}
    return [
        (torch.version, {"cuda": "12.6" if is_old else "13.0"}),
        (torch.backends.cuda, {"is_built": lambda: True}),
        (torch.backends.cudnn, yes | {"version": lambda: 91002}),  # 9.10.2
        (torch.cuda.nccl, yes | {"version": lambda: (2, 27, 7)}),
        # NVTX marks ranges for a profiler of the GPU; there is none.
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
    """The result of `torch.cuda.cudart()`: CUDA's runtime, whose calls all succeed.

    free_and_total: the function behind `cudaMemGetInfo`.
    """
    return _done(
        "cudaProfilerStart cudaProfilerStop cudaHostRegister cudaHostUnregister cudaStreamCreate "
        "cudaStreamDestroy",
        cudaError=types.SimpleNamespace(success=0),
        cudaMemGetInfo=free_and_total,
    )


def _done(calls, **more):
    """A namespace of functions that do nothing and return 0, CUDA's success, and of more names."""
    return types.SimpleNamespace(**dict.fromkeys(calls.split(), lambda *args: 0), **more)


class DeviceProperties:
    """The result of `torch.cuda.get_device_properties` for a `memlab.gpus.GPU`."""

    warp_size = 32
    regs_per_multiprocessor = 65536
    max_threads_per_block = 1024
    shared_memory_per_block = 48 * 2**10
    is_integrated = is_multi_gpu_board = 0
    pci_bus_id = pci_device_id = pci_domain_id = 0

    def __init__(self, gpu, memory):
        self._memory = memory
        self.name = gpu.name
        self.gcnArchName = gpu.name  # AMD's attribute; CUDA builds repeat the name here
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.processors
        self.uuid = uuid.uuid5(uuid.NAMESPACE_DNS, gpu.name)  # the same in every run
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
