"""A GPU that is not there: real training loops on fake tensors, under CUDA's rules.

Inside `SimulatedGPU` every tensor is a fake one: it has a shape, a dtype and a lifetime, but no
data. What CUDA's kernels would keep, what its libraries would take and how its allocator would
serve it is followed byte by byte, so a full-size model runs in seconds on a laptop and runs out
of memory where the card would.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from unittest import mock

import torch
from tqdm.auto import tqdm

from memlab import cuda_rules, depth, fake
from memlab.allocator import CachingAllocator, CapacityError
from memlab.footprint import Footprint
from memlab.gpus import GPU, cublas_workspace
from memlab.gpus import gpu as find_gpu
from memlab.recipe import Recipe
from memlab.tracer import BACKWARD, FORWARD, Tracer
from memlab.training import Training, import_bitsandbytes, import_peft


def simulate(recipe: Recipe, gpu: GPU | str | int | None = None) -> Footprint:
    """The memory of one optimizer step of `recipe` on a GPU that need not be there.

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a card without a limit.

    Two steps run; the second is counted, because optimizer states appear in the first. Of a model
    with many equal layers only a few run, and `memlab.depth` writes the others into the log.

    Raises torch.OutOfMemoryError in PyTorch's own words when the card is too small, and
    ValueError when it does not have the recipe's number format.
    """
    # Outside, because packages make tensors when they are imported.
    if recipe.optimizer.endswith("8bit"):
        import_bitsandbytes(recipe.optimizer)
    if recipe.lora_rank:
        import_peft()
    simulated = SimulatedGPU(gpu)
    simulated.require(recipe.precision)
    log = depth.log_at_full_depth(recipe, lambda shallow: trace(shallow, simulated.gpu))
    if log:
        return simulated.replay(log)
    with simulated:
        return simulated.footprint_of(_two_steps(recipe, simulated))


def _two_steps(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    training = Training(recipe, simulated.device)
    simulated.tracer.watch(training.model, inputs=training.inputs)
    # From the third micro-batch on, each repeats the bytes of the second; only its loss, a
    # number of 512 bytes as an allocator's block, would be added.
    held, training.batches = training.batches, training.batches[:2]
    for _ in tqdm(range(2), f"simulating {recipe.model_name}", leave=False, delay=2):
        simulated.reset_peak()
        training.step()
    training.batches = held
    return training


def trace(recipe: Recipe, gpu: GPU | None = None) -> depth.Log:
    """What `recipe` does to memory, at its own depth, on a card like `gpu` without a limit."""
    if recipe.optimizer.endswith("8bit"):  # outside: packages make tensors when imported
        import_bitsandbytes(recipe.optimizer)
    if recipe.lora_rank:
        import_peft()
    simulated = SimulatedGPU(gpu and replace(gpu, total_memory=2**60))
    tracer, emptied = simulated.tracer, []
    tracer.allocator.empty_cache = lambda: emptied.append(len(tracer.events))
    with simulated:
        return depth.Log.of(tracer, emptied, _two_steps(recipe, simulated))


class SimulatedGPU:
    """A context in which training loops run on a card that need not be there.

        with SimulatedGPU("T4") as gpu:
            ...build the model, train two steps...
        print(gpu.footprint)

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a card without a limit.

    Code written for CUDA runs unchanged as far as it places tensors (`.to("cuda")`, `.cuda()`,
    `device="cuda"`), uses `torch.autocast("cuda")` and `torch.amp.GradScaler("cuda")`, and asks
    `torch.cuda` for memory figures. What it assumes:

    - Everything made inside lives on the card, except scalars made by `torch.tensor(number)`,
      which stay on the host as they do with CUDA (AdamW's step counters), and the states of
      paged optimizers, which lie in managed memory outside PyTorch's allocator. How much of
      those the driver keeps on the card at a time is not simulated.
    - bitsandbytes, where the loop uses it, is imported before.
    - Tensors hold no data: `loss.item()` gives 1.0, and code that branches on values follows
      one branch. The gradient scaler never skips a step.
    - One stream, the allocator's default settings, no other process on the card.

    Raises torch.OutOfMemoryError, with PyTorch's message, where the card would.
    """

    entered = False  # one card at a time

    def __init__(self, gpu: GPU | str | int | None = None):
        self.gpu = None if gpu is None else find_gpu(gpu)
        capacity = self.gpu.usable if self.gpu else None
        self.tracer = CudaTracer(self.gpu, CachingAllocator(capacity))
        self._at_exit = None
        self.device = torch.device("cpu")  # what fake tensors say of themselves

    def __enter__(self) -> SimulatedGPU:
        if SimulatedGPU.entered:
            raise ValueError("a SimulatedGPU is entered already: leave it before the next")
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake.tensors_without_data())
            stack.enter_context(fake.cuda_code_on_cpu_tensors())
            stack.enter_context(fake.paged_states(self.tracer.zeros_on_host))
            stack.enter_context(cuda_rules.cuda_kernels())
            for name, answer in self._memory_functions().items():
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            stack.enter_context(self.tracer)
            self._stack = stack.pop_all()
        SimulatedGPU.entered = True
        return self

    def __exit__(self, *error):
        SimulatedGPU.entered = False
        self._at_exit = self.footprint  # what dies later is no part of it
        return self._stack.__exit__(*error)

    def reset_peak(self) -> None:
        """Count from here, as `torch.cuda.reset_peak_memory_stats()` does."""
        self.tracer.reset_peak()

    def require(self, precision: str) -> None:
        """Raise ValueError if the card computes a recipe's precision by emulation only."""
        if self.gpu and "bf16" in precision and self.gpu.capability < (8, 0):
            raise ValueError(
                f"precision is {precision!r}: {self.gpu.name} has no native bfloat16 and allows "
                "fp32, fp16-amp"
            )

    def replay(self, log: depth.Log) -> Footprint:
        """The footprint of a log, served by this card's allocator."""
        self.tracer = Replay(self.gpu, self.tracer.allocator)
        log.replay(self.tracer)
        return self.footprint_of(log)

    @property
    def footprint(self) -> Footprint:
        """The peak since the last `reset_peak`, or since the beginning."""
        return self._at_exit or self.footprint_of(None)

    def footprint_of(self, training: Training | depth.Log | None) -> Footprint:
        """The same with the parameter counts of `training`."""
        footprint = self.tracer.footprint()
        context = self.gpu.context if self.gpu else None
        return replace(
            footprint,
            parameters=training and training.parameters,
            trainable_parameters=training and training.trainable_parameters,
            context=context,
            device_used=None if context is None else footprint.peak_reserved + context,
        )

    def _memory_functions(self):
        """What `torch.cuda` answers inside."""
        tracer, allocator = self.tracer, self.tracer.allocator
        return {
            "memory_allocated": lambda device=None: allocator.allocated,
            "memory_reserved": lambda device=None: allocator.reserved,
            "max_memory_allocated": lambda device=None: tracer.peak()[0],
            "max_memory_reserved": lambda device=None: tracer.peak()[1],
            "reset_peak_memory_stats": lambda device=None: tracer.reset_peak(),
            "empty_cache": allocator.empty_cache,
            "synchronize": lambda device=None: None,
            "mem_get_info": lambda device=None: tracer.free_and_total(),
        }


class CudaTracer(Tracer):
    """A tracer that serves memory as a CUDA device does, with its workspaces and its limit."""

    def __init__(self, gpu: GPU | None, allocator: CachingAllocator):
        super().__init__(allocator)
        self.gpu = gpu
        self.workspace = gpu.workspace if gpu else cublas_workspace((8, 0))
        self._handles_used = set()
        self._unseen = False
        self._on_host = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # asked very often, touches no memory
            return func(*args)
        # A number made by torch.tensor() without a device stays on the host.
        if func is torch.ops.aten.lift_fresh.default and args[0].dim() == 0:
            return self.keep_on_host(func(*args))
        self._take_workspaces(func)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        scratch = cuda_rules.kernel_scratch(func, args)
        if scratch:
            self._death(self._birth(scratch, "temporary"))
        return out

    def zeros_on_host(self, like, dtype):
        """Zeros of the shape of `like` that the card never holds."""
        self._unseen = True
        zeros = torch.zeros_like(like, dtype=dtype)
        self._unseen = False
        return self.keep_on_host(zeros)

    def keep_on_host(self, tensor):
        """Count a new tensor's storage as the host's from now on."""
        storage = tensor.untyped_storage()
        self._on_host[id(storage)] = storage
        return tensor

    def _take_workspaces(self, func) -> None:
        """cuBLAS takes a workspace at a thread's first product and keeps it.

        The backward pass has a thread, and so a handle and a workspace, of its own
        (aten/src/ATen/cuda/CublasHandlePool.cpp); so has cublasLt, which addmm uses for the
        bias.
        """
        if not cuda_rules.uses_cublas(func):
            return
        thread = self._phase() == BACKWARD
        for handle, nbytes in (
            ("cublas", self.workspace),
            ("cublasLt", cuda_rules.CUBLASLT_WORKSPACE),
        ):
            wanted = handle == "cublas" or func is torch.ops.aten.addmm.default
            if wanted and (handle, thread) not in self._handles_used:
                self._handles_used.add((handle, thread))
                self._birth(nbytes, "workspaces")

    def _see(self, tensor, category=None, existed=False) -> None:
        if not self._unseen and id(tensor.untyped_storage()) not in self._on_host:
            super()._see(tensor, category, existed)

    def _birth(self, nbytes, category) -> int:
        try:
            return super()._birth(nbytes, category)
        except CapacityError as error:
            raise torch.OutOfMemoryError(self._message(error.segment)) from None

    def free_and_total(self) -> tuple[int, int]:
        """Bytes free on the card and its size, as `torch.cuda.mem_get_info` gives them."""
        if self.gpu is None:
            raise ValueError("mem_get_info needs a card: SimulatedGPU was given none")
        used = self.gpu.context + self.allocator.reserved
        return self.gpu.total_memory - used, self.gpu.total_memory

    def _message(self, segment) -> str:
        """PyTorch's words: c10/cuda/CUDACachingAllocator.cpp."""
        free, total = self.free_and_total()
        allocated, reserved = self.allocator.allocated, self.allocator.reserved
        return (
            f"CUDA out of memory. Tried to allocate {_size(segment)}. GPU 0 has a total capacity "
            f"of {_size(total)} of which {_size(free)} is free. Including non-PyTorch memory, "
            f"this process has {_size(total - free)} memory in use. Of the allocated memory "
            f"{_size(allocated)} is allocated by PyTorch, and {_size(reserved - allocated)} is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
            "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
            "See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


class Replay(CudaTracer):
    """A tracer that is told what happens; `phase` says when."""

    phase = FORWARD

    def _phase(self) -> str:
        return self.phase


def _size(nbytes: int) -> str:
    """Bytes in the words of the allocator's `format_size`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes > unit or (unit == 2**10 and nbytes == unit):
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
