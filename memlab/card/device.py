"""A GPU that is not there, and its host: real training loops under CUDA's rules.

Inside `SimulatedGPU` a tensor on the card is a fake one: it has a shape, a dtype and a lifetime,
but no data. What CUDA's kernels would keep, what its libraries would take and how its allocator
would serve it is followed byte by byte, so a full-size model runs in seconds on a laptop and runs
out of memory where the card would. The host stays a host: samplers, tokenizers and collators work.
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
    """A context in which training loops run on a card that need not be there.

        with SimulatedGPU("T4") as gpu:
            ...build the model, train two steps...
        print(gpu.footprint)

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a card without a limit.
    rules: which of `memlab.card.kernels.rules.RULES` hold; all do on a card.
    script: its path; `Footprint.by_line` then tells which of its lines made what.
    ranks: how many processes train together; this is the first (`memlab.card.process_group`).
    compile_eagerly: whether what `torch.compile` would compile runs as it is, which is no bound of
        what it takes, as `Footprint.assumptions` says; else it is refused. PyTorch's own switches
        (disable=True, TORCH_COMPILE_DISABLE=1, backend="eager") hold without, and a compiled
        `flex_attention` or `create_block_mask` is its kernel.
    link: between them, a name of `memlab.card.links.LINKS`, for the time of their collectives;
        None takes NVLink where the card has it, and else PCIe.

    Code written for CUDA runs unchanged: it places tensors (`.to("cuda")`, `.cuda()`,
    `device="cuda"`, `device_map="cuda"`), uses `torch.autocast("cuda")` and
    `torch.amp.GradScaler("cuda")`, asks `torch.cuda` and `torch.accelerator` for the card and its
    memory, and hands its model to peft, bitsandbytes, Accelerate or transformers' Trainer. What is
    not simulated is refused by a NotSimulated, a ValueError, that names it: a second card, CUDA
    graphs, torch.compile, sparse and nested tensors. Each time between two events reads as 1 ms.
    Dtypes that a kernel would refuse, and indices that are known to be out of range, are refused in
    CUDA's words. `torch.inference_mode()` is as `torch.no_grad()`.

    `torch.distributed` starts a group of PyTorch's fake backend, whichever is asked for. With
    several ranks there is torchrun's environment and a card for each, and code written for torchrun
    runs as its first rank: DistributedDataParallel, `fully_shard`, ZeroRedundancyOptimizer,
    `parallelize_module`. Of as many processes as `torch.multiprocessing.spawn` starts the first
    runs, here. What arrives from other ranks is a stand-in, and integers are those of this one.
    Pipelines, RPC and FullyShardedDataParallel are refused.

    Where things lie:

    - What is made without naming the card lies on the host and does not count. Integers, booleans
      and tensors up to 1 MiB are ordinary ones with data; larger ones, weights, have none until
      they move. What meets a tensor of the other place is refused in CUDA's words.
    - A model from outside may move in. It has its data again when the card is left.
    - The states of paged optimizers lie in managed memory outside PyTorch's allocator. How much of
      those the driver keeps on the card at a time is not simulated.

    What values are:

    - Up to 262,144 integers or booleans, and single numbers, keep theirs on the card where all that
      they were made of is known. So shapes that follow from masks and lengths are those of a run.
    - Any other number reads as 1, in `.item()`, in print and, up to 16 MiB, in a copy on the host;
      larger copies hold zeros. Comparisons come out of that, isnan and isinf are False, and the
      gradient scaler never skips a step.
    - A `while` loop that reads such a value in 20 turns, while nothing that is known changes, is
      given another one, which `Footprint.assumptions` says; one that reads it in 10,000 is refused.
      Whether numbers are finite is always answered so.
    - Where a shape follows from values that are not known, it is the largest that can come out
      (nonzero, boolean masks, masked_select, unique; bincount with minlength), and the choices of a
      top-k, such as an expert mixture's, are spread evenly; `Footprint.assumptions` then says so.
      What has no largest is refused: bincount without minlength, repeat_interleave without
      output_size.
    - A checkpoint is written with zeros that take no room on the disk (`memlab.card.checkpoints`).
    - Several sequences packed into one row are told apart where their position_ids are known.

    What else it assumes: a stream waits for no other, and what another stream has used
    (`record_stream`) is free at once; the allocator's default settings, but for
    `expandable_segments` in PYTORCH_ALLOC_CONF or set while the program runs; no other process on
    the card, and nothing of NCCL's own. Weights of a checkpoint are read one after the other, where
    transformers takes four threads unless it quantizes them. Recurrent layers run as PyTorch's own
    operations, where a card may take a kernel of cuDNN's; what cuDNN takes for itself in a
    convolution is not counted.
    Kernels of Triton write into tensors that are there and take none; where Triton is not
    installed, libraries may go another way. transformers finds flash-attn 2 under
    `attn_implementation="flash_attention_2"`, installed or not; PyTorch's copy of its kernels
    stands for it. A script's own `import flash_attn` is left alone.

    Raises torch.OutOfMemoryError, with PyTorch's message, where the card would.
    """

    entered = False  # one card at a time
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
            link_rate(self.gpu, link)  # or refuses
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
        self._stack: contextlib.ExitStack | None = None  # of what is patched while it is entered
        self.device = CARD

    def __enter__(self) -> SimulatedGPU:
        if SimulatedGPU.entered:
            raise ValueError("a SimulatedGPU is entered already: leave it before the next")
        if self._stack is not None:
            raise ValueError("this SimulatedGPU was entered before: make another for another run")
        if self.imports_bitsandbytes and importlib.util.find_spec("bitsandbytes"):
            # Other libraries import it, and inside it would look for its CUDA library.
            import_bitsandbytes("SimulatedGPU")
        try:
            self._stack = self._contexts()
        except AttributeError as error:
            here = ", ".join(f"{name} {version}" for name, version in installed().items())
            raise ValueError(
                f"{error}: this memlab is older than what is here ({here}); install a newer one, "
                "or older releases of these"
            ) from error
        SimulatedGPU.entered = True
        return self

    def _contexts(self) -> contextlib.ExitStack:
        """Everything that is replaced while the card is entered."""
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
        self.tracer.stop()  # what dies later is no part of it
        assert self._stack is not None  # it was entered
        return self._stack.__exit__(kind, error, traceback)

    def watch(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        """Name and count these from now on, also the parts that no operation touches."""
        self.tracer.watch(model, optimizer, inputs)

    def reset_peak(self) -> None:
        """Count from here, as `torch.cuda.reset_peak_memory_stats()` does."""
        self.tracer.reset_peak()

    @property
    def footprint(self) -> Footprint:
        """The peak since the last `reset_peak`, or since the beginning."""
        return card_footprint(self.tracer, self.work.of_step, link=self.link)

    def snapshot(self) -> dict[str, Any]:
        """What happened on the card, in the form of `torch.cuda.memory._snapshot()`."""
        return take_snapshot(self.tracer)

    def dump_snapshot(self, path: str | Path) -> None:
        """Write the snapshot to a file that PyTorch's viewer opens (pytorch.org/memory_viz)."""
        with open(path, "wb") as file:
            pickle.dump(self.snapshot(), file)
