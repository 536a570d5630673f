"""Memory that kernels and libraries take on a card beside the tensors that PyTorch returns."""

import weakref

import torch

from memlab.card.kernels import composites, scratch
from memlab.footprint import Category, Phase
from memlab.gpus import GPU
from memlab.trace.reductions import UNLIMITED
from memlab.trace.tracer import Tracer


class KernelMemory:
    """Enters what an operator takes by the card's rules into a tracer's ledger.

    rules: which of `memlab.card.kernels.rules.RULES` hold.
    """

    def __init__(self, tracer: Tracer, gpu: GPU, rules):
        self._tracer, self._gpu, self.rules = tracer, gpu, rules
        self._handles_used: set[tuple[str, bool]] = set()

    def take_and_give_back(self, *sizes: int) -> None:
        """Take tensors of so many bytes, that are there together, and give them back."""
        storages = [self._tracer.born(nbytes, Category.TEMPORARY) for nbytes in sizes]
        for storage in storages:
            self._tracer.died(storage)

    def take_scratch(self, func, args, out) -> None:
        """What a kernel takes and gives back inside, and what its result holds beside its own."""
        taken = [*scratch.kernel_scratch(func, args), *composites.temporaries(func, args)]
        nbytes = composites.kept(func, args)
        if "scratch of kernels" not in self.rules:
            return
        if nbytes:
            storage = self._tracer.born(nbytes, Category.TEMPORARY)
            weakref.finalize(out.untyped_storage(), self._tracer.died, storage)
        for sizes in taken:
            self.take_and_give_back(*sizes)

    def take_buffer(self, func, args) -> None:
        """The buffer of a sum along rows."""
        reduction = scratch.reduction_of(func, args)
        nbytes = reduction and reduction.buffer(self._gpu.threads)
        if reduction and self._tracer.most is not None:
            # At other widths too few threads may be enough.
            nbytes = min(reduction.buffer(UNLIMITED), 1)
        if nbytes and "sums of rows" in self.rules:
            storage = self._tracer.born(nbytes, Category.TEMPORARY)
            storage.reduction = reduction
            self._tracer.died(storage)

    def take_workspaces(self, func) -> None:
        """cuBLAS takes a workspace at a thread's first product and keeps it.

        The backward pass has a thread, and so a handle and a workspace, of its own
        (aten/src/ATen/cuda/CublasHandlePool.cpp); so has cublasLt, which addmm uses for the
        bias.
        """
        if func._opname not in scratch.MATRIX_PRODUCTS:
            return
        self._tracer.operation = func
        thread = self._tracer.phase() == Phase.BACKWARD
        for handle, nbytes in (
            ("cublas", self._gpu.workspace),
            ("cublasLt", scratch.CUBLASLT_WORKSPACE),
        ):
            wanted = handle == "cublas" or func is torch.ops.aten.addmm.default
            if wanted and (handle, thread) not in self._handles_used:
                self._handles_used.add((handle, thread))
                self._tracer.born(nbytes, Category.WORKSPACES)
