"""A GPU that is not there: real training loops on fake tensors, under CUDA's rules.

Inside `SimulatedGPU` every tensor is a fake one: it has a shape, a dtype and a lifetime, but no
data. What CUDA's kernels would keep, what its libraries would take and how its allocator would
serve it is followed byte by byte, so a full-size model runs in seconds on a laptop and runs out
of memory where the card would.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
from dataclasses import replace
from pathlib import Path

import torch

from memlab.card import cuda_names, fake_tensors, kernels
from memlab.card.memory import CudaTracer, Replay
from memlab.footprint import Footprint
from memlab.gpus import GPU, find_gpu
from memlab.quantized import import_bitsandbytes
from memlab.trace import depth
from memlab.trace.allocator import CachingAllocator
from memlab.trace.snapshot import take_snapshot
from memlab.training import Training


class SimulatedGPU:
    """A context in which training loops run on a card that need not be there.

        with SimulatedGPU("T4") as gpu:
            ...build the model, train two steps...
        print(gpu.footprint)

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a card without a limit.
    rules: which of `memlab.card.kernels.RULES` hold; all do on a card.

    Code written for CUDA runs unchanged: it places tensors (`.to("cuda")`, `.cuda()`,
    `device="cuda"`, `device_map="cuda"`), uses `torch.autocast("cuda")` and
    `torch.amp.GradScaler("cuda")`, asks `torch.cuda` and `torch.accelerator` for the card and its
    memory, and hands its model to peft, bitsandbytes, Accelerate or transformers' Trainer.
    What is not simulated is refused by a ValueError that names it: a second card, streams other
    than the default one, CUDA graphs, torch.compile, times. What it assumes:

    - Everything made inside lives on the card, except scalars made by `torch.tensor(number)`,
      which stay on the host as they do with CUDA (AdamW's step counters), and the states of
      paged optimizers, which lie in managed memory outside PyTorch's allocator. How much of
      those the driver keeps on the card at a time is not simulated. `tensor.device` says cpu.
    - What `torch.autograd.graph.save_on_cpu`, made inside, saves lies on the host, weights too.
    - Tensors made outside, or by a DataLoader's workers, hold data and lie on the host;
      `.to("cuda")` makes a new one on the card, `.cpu()` and `.to("cpu")` one on the host,
      except of a tensor with a gradient. Parameters made outside count as the card's from their
      first use on.
    - Several sequences packed into one row are told apart by position_ids that hold data when
      they move to the card; position_ids made inside count as those of one sequence a row.
    - Tensors hold no data: `loss.item()` gives 1.0, and code that branches on values follows
      one branch. The gradient scaler never skips a step.
    - One stream, the allocator's default settings, no other process on the card. Weights of a
      checkpoint are read one after the other, where transformers takes four threads unless it
      quantizes them.

    Raises torch.OutOfMemoryError, with PyTorch's message, where the card would.
    """

    entered = False  # one card at a time

    def __init__(self, gpu: GPU | str | int | None = None, rules=frozenset(kernels.RULES)):
        self.gpu = None if gpu is None else find_gpu(gpu)
        capacity = self.gpu.usable if self.gpu else None
        self.tracer = CudaTracer(self.gpu, CachingAllocator(capacity), rules)
        self._at_exit = None
        self.device = torch.device("cpu")  # what fake tensors say of themselves

    def __enter__(self) -> SimulatedGPU:
        if SimulatedGPU.entered:
            raise ValueError("a SimulatedGPU is entered already: leave it before the next")
        if importlib.util.find_spec("bitsandbytes"):
            # Other libraries import it, and inside it would look for its CUDA library.
            import_bitsandbytes("SimulatedGPU")
        tracer = self.tracer
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake_tensors.tensors_without_data(tracer.moved))
            stack.enter_context(
                fake_tensors.cuda_code_on_cpu_tensors(tracer.on_host, tracer.to_host)
            )
            stack.enter_context(fake_tensors.paged_states(tracer.zeros_on_host))
            stack.enter_context(fake_tensors.saved_on_host(tracer))
            rules, met = tracer.rules, tracer.met_rules
            stack.enter_context(kernels.cuda_kernels(gpu=self.gpu, rules=rules, met=met))
            stack.enter_context(cuda_names.cuda_answers(tracer, self.snapshot))
            stack.enter_context(tracer)
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

    def snapshot(self) -> dict:
        """What happened on the card, in the form of `torch.cuda.memory._snapshot()`."""
        return take_snapshot(self.tracer)

    def dump_snapshot(self, path: str | Path) -> None:
        """Write the snapshot to a file that PyTorch's viewer opens (pytorch.org/memory_viz)."""
        with open(path, "wb") as file:
            pickle.dump(self.snapshot(), file)
