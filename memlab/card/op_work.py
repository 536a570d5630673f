"""What each operator of a step does on a card: floating-point operations, bytes, kernels.

Operations are counted by PyTorch's own registry (torch.utils.flop_counter), but for fused
attention and experts. Bytes are those of the tensors that an operator reads and writes,
once each: what a fused kernel keeps to itself, such as the scores of an attention, is not counted.
"""

import functools
import math
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
    """The work of the optimizer step that is under way, and of the last whole one."""

    def __init__(self):
        self._now: Counter[Work] = Counter()
        self._whole: Counter[Work] | None = None
        self._stepped = set()  # the optimizers of the last whole step
        self._micro_batch, self._phase = 0, Phase.FORWARD
        self._ends = False  # the step, with the backward pass that is under way

    @property
    def of_step(self) -> Counter:
        """Work -> how often, from the end of one optimizer step to the end of the next.

        Of the last such stretch; before two steps have ended, of everything.
        """
        return self._now if self._whole is None else self._whole

    def note(self, func, args, kwargs, tensors, out, phase: Phase, stream: int = 0) -> None:
        """Count an operator that has just run. tensors: what it was given, stream: a number."""
        if _does_nothing(func) and func.namespace != "c10d":
            return
        if func._opname in COPIES and not all(map(on_card, tensors)) and out.nbytes >= TRIFLE:
            self.note_copy(out.nbytes, phase)
            return
        self._begin(phase)
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
        """Count a copy between card and host."""
        self.add(Work(phase=phase, carried=nbytes))

    def add(self, work: Work) -> None:
        """Count a kernel, in the micro-batch that is under way."""
        self._begin(work.phase)
        self._now[work._replace(micro_batch=self._micro_batch)] += 1

    def _begin(self, phase: Phase) -> None:
        """An operator of a phase comes, maybe the first of a micro-batch or a step."""
        if self._ends and phase not in (Phase.BACKWARD, Phase.STEP):
            self.end_step()
        if phase == Phase.FORWARD and self._phase == Phase.BACKWARD:
            self._micro_batch += self._micro_batch != UPDATE
        self._phase = phase

    def begin_update(self) -> None:
        """The gradients of the step are there, unless the backward pass has used them up."""
        if self._ends:
            self.end_step()
        else:
            self._micro_batch = UPDATE

    def end_step_in_backward(self) -> None:
        """An optimizer has stepped in a backward pass, in which others may be to come."""
        self._ends = True

    def end_step(self, optimizer: object = None) -> None:
        """An optimizer has stepped; one more without a backward pass between is of the same step.

        optimizer: None where weights were changed by hand.
        """
        self._ends = False
        another = optimizer is not None and id(optimizer) not in self._stepped
        in_backward = any(work.phase == Phase.BACKWARD for work in self._now)
        if self._whole and another and not in_backward:
            self._whole += self._now
            self._now.clear()
        else:
            self._stepped.clear()
            if self._now:
                self._whole, self._now = self._now, Counter()
        self._stepped |= {id(optimizer)}
        self._micro_batch, self._phase = 0, Phase.FORWARD


# ---------------------------------------------------------------------- one operator

COPIES = "copy_", "_to_copy"
NO_KERNEL = set(
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ set_ "
    "_local_scalar_dense lift_fresh _reshape_alias _unsafe_view is_pinned record_stream".split()
)
# What they write covers everything that was there, so the target is not read.
OVERWRITES = set("copy_ fill_ zero_ normal_ uniform_ random_ _foreach_copy_ _foreach_zero_".split())
# They read of a table no more than they write, and write into one no more than they read.
GATHERS = set("embedding index index_select gather _index_put_impl_ index_put_ scatter_".split())

# bitsandbytes' updates with 8-bit states -> the place of the weight among their arguments.
CODED = {"optimizer_update_8bit_blockwise": 2}


@functools.cache
def _does_nothing(func) -> bool:
    """Whether an operator only makes a view or takes memory."""
    if func.namespace == "prim" or func._schema.name.partition("::")[2] in NO_KERNEL:
        return True
    returns = func._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


@functools.cache
def _gives_out(func) -> bool:
    """Whether what an operator writes into is its `out`."""
    return any(argument.is_out for argument in func._schema.arguments)


def _bytes(tensor) -> int:
    """Bytes that reading or writing a tensor moves: what it repeats counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _work_of(func, args, kwargs, tensors, out) -> Iterator[tuple[int, str, tuple, tuple, int, int]]:
    """The first six fields of `Work` of an operator, or of each tensor of its lists."""
    name = func._schema.name.partition("::")[2]
    written = written_by(func, args, kwargs)
    if name.startswith(("_fused_ada", "_fused_sgd")):  # a gradient is written only to unscale it
        del written[1]
    if args and isinstance(args[0], (list, tuple)) and ("foreach" in name or "_fused_" in name):
        yield from _of_lists(name, args, written, out)
        return
    results = [] if written else tensors_in([out])
    if name in GATHERS:
        moved = tensors[1:] if written else [*results, *results]
        moved = [*moved, *tensors[1:2]]
    else:
        moved = [*tensors, *results, *tensors_in(written)]
        if name in OVERWRITES or _gives_out(func):  # it is not read
            moved = _without(moved, tensors_in(written))
    flops, dtype = _products(func, args, kwargs, tensors, out)
    tiled = flops and _name(func) in TILED
    result = (math.prod(out.shape[:-2]), *out.shape[-2:]) if tiled else ()
    coded = args[CODED[name]].numel() if name in CODED else 0
    yield flops, dtype, result, tuple(sorted(map(_bytes, moved))), 0, coded


def _without(tensors, others) -> list:
    """The list less each of the others, once."""
    left = list(tensors)
    for other in others:
        left.pop(next(i for i, tensor in enumerate(left) if tensor is other))
    return left


def _of_lists(name, args, written, out) -> Iterator[tuple]:
    """A tensor at a time, so that the work of a deep model is that of its layers."""
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

MATRICES = {"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}
UNLISTED = ("_grouped_mm", "int8_linear_matmul")  # by PyTorch's registry


def _name(func) -> str:
    """The name of an operator, that of `addmm` for `addmm_`, which writes into its first."""
    return func._opname.removesuffix("_")


def _products(func, args, kwargs, tensors, out) -> tuple[int, str]:
    """Operations of an operator's matrix products, and what they are computed in."""
    if func._opname.startswith(ATTENTION):
        flops = _attention(func, args, kwargs)
    elif func._opname in UNLISTED:
        groups = len(out) if out.dim() > args[0].dim() else 1  # share what a gradient sums over
        flops = 2 * out.numel() * args[0].size(-1) // groups
    else:
        name = _name(func)
        packet = getattr(torch.ops.aten, name) if name in MATRICES else func.overloadpacket
        count = flop_registry.get(packet)
        matrices = MATRICES.get(name, len(args))  # what else these take is no shape
        flops = count(*args[:matrices], **kwargs, out_val=out) if count else 0
    if not flops:
        return 0, ""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if tensors[0].is_complex():  # a product of complex numbers is four of real ones
        flops, dtype = 4 * flops, "float32"
    return flops, dtype


TILED = (*MATRICES, *UNLISTED)


# Fused attention: SDPA's kernels, flash's own, and that of torch.nn.attention.varlen.
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_varlen_attn")


def _attention(func, args, kwargs) -> int:
    """Operations of a fused attention: two products forward, five backward, the scores again.

    Every query head has products of its own, also where heads share keys, which the registry of
    older PyTorch refuses. What a causal mask hides, half of it, is not computed.
    """
    given = named(func, args) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    if func._opname.startswith("_scaled_dot_product"):  # [batch, heads, length, head size]
        scores = query.shape[:-1].numel() * key.size(-2)
    else:
        scores = query.size(-2) * _pairs(given)
    size, value_size = query.size(-1), value.size(-1)
    backward = "backward" in func._opname
    flops = 2 * scores * (3 * size + 2 * value_size if backward else size + value_size)
    return flops // 2 if given.get("is_causal") else flops


def _pairs(given: dict) -> int:
    """Queries times keys that each sees, of [batch, length, heads, head size], or of ragged ones.

    Those are [tokens, heads, head size], with borders between sequences. Where borders have no
    values, every sequence counts as the longest.
    """
    query, key = given["query"], given["key"]
    borders = [given[name] for name in given if name in ("cum_seq_q", "cu_seq_q")]
    borders += [given[name] for name in given if name in ("cum_seq_k", "cu_seq_k")]
    if borders[0] is None:
        return query.size(0) * query.size(1) * key.size(1)
    queries, keys = map(values_of, borders)
    if queries is None or keys is None:
        return (len(borders[0]) - 1) * given["max_q"] * given["max_k"]
    with no_dispatch():
        return int((queries.diff().long() * keys.diff().long()).sum())
