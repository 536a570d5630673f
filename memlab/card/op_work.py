"""Counts what each operator of a step does on the GPU: operations, bytes moved, kernels launched.

The operations of matrix products come from PyTorch's registry (torch/utils/flop_counter.py). Fused
attention and grouped or 8-bit products are counted here. Bytes are those of the tensors that an
operator reads and writes, once each. `memlab.card.step_time` turns the counts into seconds.

Known limitations: memory traffic inside a fused kernel is not counted, such as that of attention's
scores. Operators without a formula, elementwise ones for instance, count by their bytes alone.
"""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterator

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils.flop_counter import flop_registry

from memlab.card.collectives import is_waited_for, named, sent_bytes
from memlab.card.known_values import values_of, written_by
from memlab.footprint import Phase
from memlab.trace.log import UPDATE
from memlab.trace.tensors import on_card, tensors_in
from memlab.trace.work import TRIFLE, Work


class WorkLog:
    """The work of the optimizer step in progress, and of the last complete one.

    A step ends when an optimizer has stepped. Operators are attributed to micro-batches: a forward
    pass after a backward pass begins the next micro-batch.
    """

    def __init__(self):
        self._now: Counter[Work] = Counter()  # the step in progress
        self._whole: Counter[Work] | None = None  # the last complete step
        # The optimizers of the last complete step.
        self._stepped: weakref.WeakSet = weakref.WeakSet()
        self._micro_batch, self._phase = 0, Phase.FORWARD
        # Whether the step in progress ends together with its backward pass, because an optimizer
        # has stepped inside it.
        self._ends = False

    @property
    def of_step(self) -> Counter:
        """Work -> how often, in the last complete optimizer step.

        A step counts from the end of the one before; the first counts from the beginning, with all
        that was done to build the model. Before the first has ended, this is the work so far.
        """
        return self._now if self._whole is None else self._whole

    def note(self, func, args, kwargs, tensors, out, phase: Phase, stream: int = 0) -> None:
        """Count an operator that has just run.

        tensors: all tensors among its arguments. out: its result. stream: the number of the stream
        in which it ran, 0 for the default one.
        """
        if _does_nothing(func):
            return
        if func._opname in COPIES and not all(map(on_card, tensors)) and out.nbytes >= TRIFLE:
            self.note_copy(out.nbytes, phase)
            return
        self._begin(phase)
        # The engine disables grad mode for derivatives; checkpointing enables it to recompute.
        again = phase == Phase.BACKWARD and torch.is_grad_enabled()
        sent = sent_bytes(func, args, tensors, out)
        if sent is not None:
            nbytes, cards = sent
            waited = is_waited_for(func, args, stream)
            self.add(Work(phase=phase, recomputed=again, sent=nbytes, cards=cards, waited=waited))
            return
        for work in _work_of(func, args, kwargs, tensors, out):
            self._now[Work(*work, phase, again, self._micro_batch)] += 1

    def note_copy(self, nbytes: int, phase: Phase) -> None:
        """Count a copy between the GPU and the host."""
        self.add(Work(phase=phase, carried=nbytes))

    def add(self, work: Work) -> None:
        """Count a kernel in the current micro-batch."""
        self._begin(work.phase)
        self._now[work._replace(micro_batch=self._micro_batch)] += 1

    def _begin(self, phase: Phase) -> None:
        """Note the phase of the next operator, which may begin a micro-batch or a step."""
        if self._ends and phase not in (Phase.BACKWARD, Phase.STEP):
            self.end_step()
        if phase == Phase.FORWARD and self._phase == Phase.BACKWARD:
            # UPDATE marks the work after `begin_update`, and must not be counted up.
            self._micro_batch += self._micro_batch != UPDATE
        self._phase = phase

    def begin_update(self) -> None:
        """Note that all gradients of the step exist; clipping and the optimizer step follow.

        If an optimizer has stepped inside the backward pass, the step is over instead.
        """
        if self._ends:
            self.end_step()
        else:
            self._micro_batch = UPDATE

    def end_step_in_backward(self) -> None:
        """Note that an optimizer has stepped inside a backward pass; more may follow in it."""
        self._ends = True

    def end_step(self, optimizer: object = None) -> None:
        """Note that an optimizer has stepped.

        Another optimizer that steps without a backward pass in between belongs to the same step.
        optimizer: None if code changed the weights by itself.
        """
        self._ends = False
        another = optimizer is not None and optimizer not in self._stepped
        in_backward = any(work.phase == Phase.BACKWARD for work in self._now)
        if self._whole and another and not in_backward:
            self._whole += self._now
            self._now.clear()
        else:
            self._stepped.clear()
            if self._now:
                self._whole, self._now = self._now, Counter()
        if optimizer is not None:
            self._stepped.add(optimizer)
        self._micro_batch, self._phase = 0, Phase.FORWARD


# ---------------------------------------------------------------------- one operator

COPIES = "copy_", "_to_copy"
# Operators that allocate, rename or read back a value, and launch no kernel.
NO_KERNEL = set(
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ set_ "
    "_local_scalar_dense lift_fresh _reshape_alias _unsafe_view is_pinned record_stream".split()
)
# In-place operators that overwrite their target without reading it.
OVERWRITES = set("copy_ fill_ zero_ normal_ uniform_ random_ _foreach_copy_ _foreach_zero_".split())
# Operators that touch only the indexed rows of a table: as many bytes as they write, or read.
GATHERS = set("embedding index index_select gather _index_put_impl_ index_put_ scatter_".split())

# bitsandbytes' optimizer updates with 8-bit states -> position of the weight in the arguments.
CODED = {"optimizer_update_8bit_blockwise": 2}


@functools.cache
def _does_nothing(func) -> bool:
    """Whether an operator launches no kernel: it creates a view, or only allocates."""
    if func.namespace == "prim" or func._schema.name.partition("::")[2] in NO_KERNEL:
        return True
    # A view's results alias arguments without writing to them.
    returns = func._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


@functools.cache
def _gives_out(func) -> bool:
    """Whether an operator has an `out=` argument, which it writes and does not read."""
    return any(argument.is_out for argument in func._schema.arguments)


def _bytes(tensor) -> int:
    """Bytes moved to read or write a tensor: an expanded tensor counts as its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _work_of(func, args, kwargs, tensors, out) -> Iterator[tuple[int, str, tuple, tuple, int, int]]:
    """The first six fields of `Work`: one tuple for an operator, or one per tensor of its lists."""
    name = func._schema.name.partition("::")[2]
    written = written_by(func, args, kwargs)
    if name.startswith(("_fused_ada", "_fused_sgd")):
        # The schema says that the gradients, the second list, are written. They are so only when a
        # gradient scaler is passed in, to unscale them.
        del written[1]
    if args and isinstance(args[0], (list, tuple)) and ("foreach" in name or "_fused_" in name):
        yield from _of_lists(name, args, written, out)
        return
    results = [] if written else tensors_in([out])
    if name in GATHERS:
        # tensors[0] is the table, tensors[1] the indices. A gather reads as much of the table as it
        # writes; a scatter writes as much as it reads from its source.
        moved = tensors[1:] if written else [*results, *results]
        moved = [*moved, *tensors[1:2]]
    else:
        # A target that is updated in place is read and written: it is among both lists.
        moved = [*tensors, *results, *tensors_in(written)]
        if name in OVERWRITES or _gives_out(func):
            moved = _without(moved, tensors_in(written))
    flops, dtype = _products(func, args, kwargs, tensors, out)
    tiled = flops and _name(func) in TILED
    result = (math.prod(out.shape[:-2]), *out.shape[-2:]) if tiled else ()
    coded = args[CODED[name]].numel() if name in CODED else 0
    yield flops, dtype, result, tuple(sorted(map(_bytes, moved))), 0, coded


def _without(tensors, others) -> list:
    """A copy of a list without one occurrence of each of the others, by identity."""
    left = list(tensors)
    for other in others:
        left.pop(next(i for i, tensor in enumerate(left) if tensor is other))
    return left


def _of_lists(name, args, written, out) -> Iterator[tuple]:
    """The work of a multi-tensor operator, one tuple per position of its lists.

    A multi-tensor optimizer passes all parameters at once. Counted by position, the work of a deep
    model is a multiple of that of one layer, as a trace of few layers needs it.
    """
    lists = [a for a in args if isinstance(a, (list, tuple)) and tensors_in(a)]
    targets = [a for a in written if isinstance(a, (list, tuple)) and tensors_in(a)]
    results = out if isinstance(out, (list, tuple)) else []
    for i, first in enumerate(lists[0]):
        read = [
            tensors_of_list[i]
            for tensors_of_list in (lists[1:] if name in OVERWRITES else lists)
            if i < len(tensors_of_list)
        ]
        moved = [*read, *(tensors_of_list[i] for tensors_of_list in targets), *results[i : i + 1]]
        nbytes = tuple(sorted(map(_bytes, tensors_in(moved))))
        yield 0, "", (), nbytes, len(lists), first.numel()


# ---------------------------------------------------------------------- products

# Operator -> how many of its first arguments are tensors whose shapes the registry's formula takes.
MATRICES = {"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}
UNLISTED = ("_grouped_mm", "int8_linear_matmul")  # products that PyTorch's registry lacks


def _name(func) -> str:
    """The name of an operator without the underscore of its in-place form."""
    return func._opname.removesuffix("_")


def _products(func, args, kwargs, tensors, out) -> tuple[int, str]:
    """(operations of an operator's products, dtype they are computed in); (0, "") if none."""
    if func._opname.startswith(ATTENTION):
        flops = _attention(func, args, kwargs)
    elif func._opname in UNLISTED:
        # _grouped_mm multiplies each row by one group's matrix. In its gradient by the weights, the
        # result has a matrix per group, and the groups share the rows that are summed over.
        groups = len(out) if out.dim() > args[0].dim() else 1
        flops = 2 * out.numel() * args[0].size(-1) // groups
    else:
        name = _name(func)
        # The registry knows `addmm` only, not `addmm_`.
        packet = getattr(torch.ops.aten, name) if name in MATRICES else func.overloadpacket
        count = flop_registry.get(packet)
        # Overloads take more arguments, such as a dtype for the result, which the formula refuses.
        matrices = MATRICES.get(name, len(args))
        flops = count(*args[:matrices], **kwargs, out_val=out) if count else 0
    if not flops:
        return 0, ""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if tensors[0].is_complex():  # one complex product is four real ones
        flops, dtype = 4 * flops, "float32"
    return flops, dtype


# Products whose result cuBLAS splits into tiles, one per processor at a time.
TILED = (*MATRICES, *UNLISTED)


# Prefixes of fused attention: SDPA's kernels, flash attention's own operators, and that of
# torch.nn.attention.varlen.
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_varlen_attn")


def _attention(func, args, kwargs) -> int:
    """Operations of fused attention.

    Two products forward: the scores, and the sum of values. Five backward: the scores again, and
    the gradients of weights, query, key and value. Every query head has its own products, even if
    heads share keys. With a causal mask, half of them are skipped.

    PyTorch's registry has such formulas too, but in older releases they refuse shared keys.
    """
    given = named(func, args) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    if func._opname.startswith("_scaled_dot_product"):  # [batch, heads, length, head size]
        scores = query.shape[:-1].numel() * key.size(-2)
    else:
        scores = query.size(-2) * _pairs(given)
    size, value_size = query.size(-1), value.size(-1)
    backward = "backward" in func._opname
    # Backward: scores, and gradients of query and key; gradients of the weights and of the value.
    flops = 2 * scores * (3 * size + 2 * value_size if backward else size + value_size)
    return flops // 2 if given.get("is_causal") else flops


def _pairs(given: dict) -> int:
    """How many pairs of a query and a key there are, in the layouts of flash attention.

    Dense tensors are [batch, length, heads, head size]. Ragged ones are [tokens, heads, head size],
    with the cumulative lengths of the sequences. If these have no values, every sequence counts as
    the longest.
    """
    query, key = given["query"], given["key"]
    # aten's operators and torch_attn's give the same arguments different names.
    borders = [given[name] for name in given if name in ("cum_seq_q", "cu_seq_q")]
    borders += [given[name] for name in given if name in ("cum_seq_k", "cu_seq_k")]
    if borders[0] is None:
        return query.size(0) * query.size(1) * key.size(1)
    queries, keys = map(values_of, borders)
    if queries is None or keys is None:
        return (len(borders[0]) - 1) * given["max_q"] * given["max_k"]
    with no_dispatch():
        return int((queries.diff().long() * keys.diff().long()).sum())
