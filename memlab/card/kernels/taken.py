"""Allocates, on the simulated GPU, the memory that kernels take besides the tensors they return.

The sizes come from `memlab.card.kernels.scratch`, `composites` and `memlab.trace.reductions`. Each
tensor is entered into the tracer's ledger, and with it into the caching allocator.
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch

from memlab.card.kernels import composites, scratch
from memlab.footprint import Category, Phase
from memlab.gpus import GPU
from memlab.trace.reductions import UNLIMITED
from memlab.trace.tracer import Tracer


class KernelMemory:
    """Enters scratch tensors, buffers and workspaces into a tracer's ledger.

    rules: the names of the rules that hold, out of `memlab.card.kernels.rules.RULES`.
    """

    def __init__(self, tracer: Tracer, gpu: GPU, rules):
        self._tracer, self._gpu, self.rules = tracer, gpu, rules
        self._handles_used: set[tuple[str, bool]] = set()  # (library, is the backward thread)

    @contextlib.contextmanager
    def taken(self, *sizes: int) -> Iterator[None]:
        """Allocate tensors of these bytes together; they are freed at the end of the block."""
        storages = []
        try:
            for nbytes in sizes:
                storages.append(self._tracer.note_alloc(nbytes, Category.TEMPORARY))
            yield
        finally:
            for storage in storages:
                self._tracer.note_free(storage)

    def take_and_give_back(self, *sizes: int) -> None:
        """Allocate tensors of these bytes together, then free them."""
        with self.taken(*sizes):
            pass

    def take_scratch(self, func, args, out) -> None:
        """Allocate and free an operator's scratch; let its result hold the extra bytes it keeps.

        To be called after the operator, so that its result is alive next to the scratch.
        """
        taken = [*scratch.kernel_scratch(func, args), *composites.temporaries(func, args)]
        nbytes = composites.kept(func, args)
        if "scratch of kernels" not in self.rules:
            return
        if nbytes:
            # On a GPU, the result's own storage is that large. Here a second storage has the bytes,
            # and is freed together with the result's.
            storage = self._tracer.note_alloc(nbytes, Category.TEMPORARY)
            weakref.finalize(out.untyped_storage(), self._tracer.note_free, storage)
        for sizes in taken:
            self.take_and_give_back(*sizes)

    def take_buffer(self, func, args) -> None:
        """Allocate and free the buffer of a sum over rows, if the GPU's kernel needs one."""
        reduction = scratch.reduction_of(func, args)
        nbytes = reduction and reduction.buffer(self._gpu.threads)
        if reduction and self._tracer.most is not None:
            # A trace for other sizes is being recorded: whether there is a buffer depends on the
            # GPU's threads and on the sizes. One byte marks the event wherever some GPU has a
            # buffer; the trace computes its size from `storage.reduction`.
            nbytes = min(reduction.buffer(UNLIMITED), 1)
        if nbytes and "sums of rows" in self.rules:
            storage = self._tracer.note_alloc(nbytes, Category.TEMPORARY)
            storage.reduction = reduction
            self._tracer.note_free(storage)

    def take_workspaces(self, func) -> None:
        """Allocate cuBLAS's workspace at a thread's first matrix product; it is never freed.

        aten/src/ATen/cuda/CublasHandlePool.cpp: a handle belongs to a thread, and
        `setWorkspaceForHandle` allocates the workspace of each. Autograd runs the backward pass in
        a thread of its own, which therefore has a second workspace. cublasLt, which `addmm` uses to
        add the bias, has another (`getCUDABlasLtWorkspace`).

        Known limitations: the source keeps one workspace per handle and stream; here all streams of
        a thread share one.
        """
        if func._opname not in scratch.MATRIX_PRODUCTS:
            return
        self._tracer.operation = func  # the one that the ledger names for the workspace
        thread = self._tracer.phase() == Phase.BACKWARD
        # cuBLAS first, even for an `addmm`: `getCurrentCUDABlasLtHandle` gets a cuBLAS handle.
        for handle, nbytes in (
            ("cublas", self._gpu.workspace),
            ("cublasLt", scratch.CUBLASLT_WORKSPACE),
        ):
            wanted = handle == "cublas" or func is torch.ops.aten.addmm.default
            if wanted and (handle, thread) not in self._handles_used:
                self._handles_used.add((handle, thread))
                self._tracer.note_alloc(nbytes, Category.WORKSPACES)
