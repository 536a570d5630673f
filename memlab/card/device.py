"""`SimulatedGPU`: runs real training loops on a GPU that does not exist, under CUDA's rules.

Inside the context, a tensor on the GPU is a fake tensor: it has a shape, a dtype and a lifetime,
but no data. Three things are followed byte by byte: what CUDA kernels save, what CUDA libraries
allocate, and how the caching allocator serves the requests. A full-size model therefore runs in
seconds on a laptop, and runs out of memory where the GPU would. The host works as usual, so
samplers, tokenizers and collators run on real data.

This module assembles the parts, which the other modules of the package implement.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.card import checkpoints, cuda_api, fake_tensors, moves
from memlab.card.card_mode import CardMode
from memlab.card.footprint import card_footprint
from memlab.card.kernels import bitsandbytes, flash_attn, triton
from memlab.card.kernels.rules import RULES, cuda_kernels
from memlab.card.kernels.taken import KernelMemory
from memlab.card.links import link_rate
from memlab.card.op_work import WorkLog
from memlab.card.placement import CARD, tensors_name_their_place
from memlab.card.process_group import check_ranks, rank_of
from memlab.card.steps import Steps
from memlab.footprint import Footprint
from memlab.gpus import GPU, find_gpu
from memlab.libraries import import_bitsandbytes, installed
from memlab.trace.card_memory import CardMemory
from memlab.trace.snapshot import take_snapshot
from memlab.trace.tracer import Tracer

if TYPE_CHECKING:
    from types import TracebackType

    import torch


class SimulatedGPU:
    """A context in which training loops run on a GPU that need not exist.

        with SimulatedGPU("T4") as gpu:
            ...build the model, train two steps...
        print(gpu.footprint)

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a GPU without a limit.
    rules: the names of the rules that hold (`memlab.card.kernels.rules.RULES`). A real GPU follows
        all of them.
    script: the path of a script. `Footprint.by_line` then tells which of its lines allocated what.
    ranks: how many processes train together; this one is the first (`memlab.card.process_group`).
    link: the link between ranks, a name of `memlab.card.links.LINKS`, for the time of their
        collectives. None means NVLink if the GPU has it, and PCIe otherwise.
    compile_eagerly: whether code that `torch.compile` would compile runs eagerly. Its memory is
        then no bound on that of compiled code, as `Footprint.assumptions` says. By default,
        `torch.compile` is refused. PyTorch's own switches (disable=True, TORCH_COMPILE_DISABLE=1,
        backend="eager") work in both cases, and a compiled `flex_attention` or `create_block_mask`
        is simulated as its kernel.

    Code written for CUDA runs unchanged. It may place tensors (`.to("cuda")`, `.cuda()`,
    `device="cuda"`, `device_map="cuda"`), use `torch.autocast("cuda")` and
    `torch.amp.GradScaler("cuda")`, and ask `torch.cuda` and `torch.accelerator` about the GPU and
    its memory. It may also hand its model to peft, bitsandbytes, Accelerate or transformers'
    Trainer. The time between any two CUDA events reads as 1 ms. `torch.inference_mode()` acts as
    `torch.no_grad()`.

    What is not simulated raises NotSimulated, a ValueError that names it: a second GPU, CUDA
    graphs, torch.compile, sparse and nested tensors. Dtypes that a CUDA kernel refuses raise
    PyTorch's own error, and so do indices that are known to be out of range.

    `torch.distributed` starts a group of PyTorch's fake backend, whichever backend is requested.
    With several ranks, the environment is that of torchrun, each rank has a GPU, and code written
    for torchrun runs as rank 0. This includes DistributedDataParallel, `fully_shard`,
    ZeroRedundancyOptimizer and `parallelize_module`. Of the processes that
    `torch.multiprocessing.spawn` starts, the first runs, in this process. Tensors that arrive from
    other ranks are stand-ins, and their integers are those of this rank. Pipelines, RPC and
    FullyShardedDataParallel are refused.

    Where tensors lie:

    - A tensor that is created without naming the GPU lies on the host and does not count. Integers,
      booleans and tensors up to 1 MiB are ordinary tensors with data. Larger ones, such as weights,
      have no data until they move. Mixing tensors of the host and the GPU raises CUDA's own error.
    - A model that was built outside may move in. It gets its data back when the context is left.
    - The states of paged optimizers lie in managed memory, outside PyTorch's allocator. How much of
      them the driver keeps on the GPU at a time is not simulated.

    What values tensors have:

    - Up to 262,144 integers or booleans, and single numbers, keep their values on the GPU, if
      everything that they were computed from is known. Shapes that follow from masks and lengths
      are therefore those of a real run.
    - Any other number reads as 1: in `.item()`, in print, and in a copy on the host of up to
      16 MiB. Larger copies hold zeros. Comparisons follow from these values, isnan and isinf are
      False, and the gradient scaler never skips a step.
    - A `while` loop that reads such a value 20 times, while nothing known changes, is given another
      value, and `Footprint.assumptions` says so. A loop that reads it 10,000 times is refused.
      Tests whether numbers are finite keep their answer in any loop.
    - If a shape follows from unknown values, it is the largest possible one (nonzero, boolean
      masks, masked_select, unique; bincount with minlength). The choices of a top-k, such as an
      expert mixture's, are spread evenly. `Footprint.assumptions` says so in both cases. Operators
      without a largest result are refused: bincount without minlength, repeat_interleave without
      output_size.
    - A checkpoint is written with zeros that take no room on the disk (`memlab.card.checkpoints`).
    - Several sequences packed into one row are kept apart if their position_ids are known.

    Known limitations and assumptions:

    - Streams never wait for each other, and a block that another stream has used
      (`record_stream`) can be reused at once.
    - The caching allocator has its default settings. The exception is `expandable_segments`, in
      PYTORCH_ALLOC_CONF or set while the program runs.
    - No other process uses the GPU. NCCL's own buffers are not counted.
    - The weights of a checkpoint are read one after the other; transformers reads with four threads
      unless it quantizes them.
    - Recurrent layers run as PyTorch's own operations, where a GPU may run a kernel of cuDNN. What
      cuDNN allocates in a convolution is not counted.
    - Triton kernels write into tensors that exist, and allocate nothing. Without Triton installed,
      libraries may take another code path.
    - transformers finds flash-attn 2 for `attn_implementation="flash_attention_2"`, installed or
      not; PyTorch's copy of its kernels is used. A script's own `import flash_attn` is left alone.

    Raises torch.OutOfMemoryError, with PyTorch's message, where the GPU would run out of memory.
    """

    entered = False  # of the class: patches are global, so one GPU at a time
    # Subclasses for memlab's own loops may switch these off. Importing bitsandbytes takes a second,
    # and only a user's script reads the allocator's settings or asks for its statistics.
    imports_bitsandbytes = reads_environment = keeps_statistics = True

    def __init__(
        self,
        gpu: GPU | str | int | None = None,
        rules: Collection[str] = frozenset(RULES),
        script: str | Path | None = None,
        ranks: int = 1,
        link: str | None = None,
        compile_eagerly: bool = False,
    ) -> None:
        self.gpu, self.ranks, self.link = find_gpu(gpu), check_ranks(ranks), link
        if link is not None:
            link_rate(self.gpu, link)  # raises ValueError for a link that the GPU does not have
        unknown = set(rules) - set(RULES)
        if unknown:
            raise ValueError(f"rules has {min(unknown)!r}: allowed are {', '.join(RULES)}")
        self.rules = rules
        self.memory = CardMemory(self.gpu, self.keeps_statistics)
        script = None if script is None else Path(script)
        self.tracer = Tracer(self.memory, card_only=True, script=script)
        self.work = WorkLog()
        self.steps = Steps(self.tracer, self.work)
        self.compile_eagerly = compile_eagerly
        self._stack: contextlib.ExitStack | None = None  # the open patches and modes
        self.device = CARD

    def __enter__(self) -> SimulatedGPU:
        if SimulatedGPU.entered:
            raise ValueError("a SimulatedGPU is active already: leave it before you enter another")
        if self._stack is not None:
            raise ValueError("this SimulatedGPU was used before: make a new one for each run")
        if self.imports_bitsandbytes and importlib.util.find_spec("bitsandbytes"):
            # Other libraries import bitsandbytes lazily. Inside the context, its import would find
            # a CUDA device and look for the compiled CUDA library.
            import_bitsandbytes("SimulatedGPU")
        try:
            self._stack = self._contexts()
        except AttributeError as error:
            # `replaced` refuses to patch a name that a library does not have.
            here = ", ".join(f"{name} {version}" for name, version in installed().items())
            raise ValueError(
                f"{error}: this memlab is older than the installed libraries ({here}); install a "
                "newer memlab, or older releases of these"
            ) from error
        SimulatedGPU.entered = True
        return self

    def _contexts(self) -> contextlib.ExitStack:
        """Enter all patches and modes, or none of them.

        The order matters: each mode is pushed above the ones before it. `CardMode` comes last, so
        it sees an operator before the fake tensor mode does.
        """
        with contextlib.ExitStack() as stack:
            fake = stack.enter_context(fake_tensors.tensors_without_data())
            kernels = KernelMemory(self.tracer, self.gpu, self.rules)
            mode = CardMode(fake, self.tracer, self.steps, self.work, kernels)
            names = stack.enter_context(moves.cuda_code(mode))
            for context in (
                tensors_name_their_place(mode.reader.host_copy),
                moves.threads_come_along(mode, names),
                bitsandbytes.paged_states(mode.host.zeros),
                cuda_kernels(self.gpu, self.rules),
                cuda_api.cuda_answers(
                    self.tracer,
                    self.snapshot,
                    self.ranks,
                    self.compile_eagerly,
                    self.reads_environment,
                ),
                rank_of(mode, self.ranks),
                flash_attn.flash_attention_2(),
                triton.nothing_is_compiled(self.tracer.assumptions),
                checkpoints.checkpoints(),
                self.tracer.hooks(),
                self.steps.counted(),
                mode,
            ):
                stack.enter_context(context)
            return stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        SimulatedGPU.entered = False
        self.tracer.stop()  # tensors that are freed after the context lived to its end
        assert self._stack is not None  # it was entered
        return self._stack.__exit__(kind, error, traceback)

    def watch(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        """Name and count a model, an optimizer's states and inputs, even before they are used."""
        self.tracer.watch(model, optimizer, inputs)

    def reset_peak(self) -> None:
        """Measure the peak from here on, as after `torch.cuda.reset_peak_memory_stats()`."""
        self.tracer.reset_peak()

    @property
    def footprint(self) -> Footprint:
        """The memory at the peak since the last `reset_peak`, or since the beginning."""
        return card_footprint(self.tracer, self.work.of_step, link=self.link)

    def snapshot(self) -> dict[str, Any]:
        """All allocations and frees, in the format of `torch.cuda.memory._snapshot()`."""
        return take_snapshot(self.tracer)

    def dump_snapshot(self, path: str | Path) -> None:
        """Write the snapshot as a file for PyTorch's viewer at pytorch.org/memory_viz."""
        with open(path, "wb") as file:
            pickle.dump(self.snapshot(), file)
