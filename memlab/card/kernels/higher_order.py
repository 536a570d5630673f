"""PyTorch's operators that take functions: `flex_attention`, `torch.cond`, loops, scans.

`torch.compile(flex_attention)` is one kernel, and so it is here (torch/_inductor/kernel/flex/
flex_attention.py). Without torch.compile PyTorch itself writes all scores out, and warns of it;
that, and what every other such operator does, runs as the operations that it is made of.
"""

import contextlib
import importlib
import inspect
import threading
import warnings
from typing import Any

import torch
from torch._C import DispatchKey
from torch.nn.attention import flex_attention as module
from torch.utils._python_dispatch import _pop_mode, _push_mode

from memlab.card.placement import NotSimulated
from memlab.footprint import Phase
from memlab.trace.patches import replaced
from memlab.trace.work import Work

# The module: its package has the operator under this name.
operators = importlib.import_module("torch._higher_order_ops.flex_attention")

ASSUMED = "flex_attention: a kernel that keeps no scores; its time is that of scores without a mask"
FUSED = "_memlab_fused"  # among the options of a kernel


class _Thread(threading.local):
    """fused: whether compiled code calls flex_attention in this thread."""

    fused = False


@contextlib.contextmanager
def functions_as_operators(all_fused: bool):
    """Let flex_attention say which of its two ways it goes.

    all_fused: whether code runs eagerly that would be compiled, flex_attention with it.

    Raises NotSimulated for a learned bias of scores that are written out.
    """
    thread = _Thread()
    thread.fused = all_fused

    def flex_attention(query, key, value, score_mod, block_mask, scale, options, *rest):
        fused = all_fused or thread.fused
        learned = _learned(score_mod, set()) if torch.is_grad_enabled() else ()
        if learned and not fused:
            raise NotSimulated(
                "flex_attention with a learned bias is not simulated without torch.compile: "
                "write torch.compile(flex_attention)"
            )
        options = options | {FUSED: fused}
        return operators.flex_attention(
            query, key, value, score_mod, block_mask, scale, options, learned, *rest[1:]
        )

    rows = (
        (module, "flex_attention_hop", flex_attention),
        # The gradient of the scores' function is not traced: no kernel is compiled of it.
        (operators, "create_fw_bw_graph", lambda score_mod, *values: (score_mod, None)),
    )
    with replaced(*rows):
        yield thread


def compiled_form(function, thread: _Thread, assumptions: dict):
    """What stands for the compiled form of a function of flex_attention's module; None for others.

    thread: what `functions_as_operators` gave.
    """
    if function is module.create_block_mask:
        return _block_mask
    if function is not module.flex_attention:
        return None

    def flex_attention(*args, **kwargs):
        assumptions[ASSUMED] = None
        before, thread.fused = thread.fused, True
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
                return module.flex_attention(*args, **kwargs)
        finally:
            thread.fused = before

    return flex_attention


def _block_mask(*args, _compile=False, **kwargs):
    """`create_block_mask`, compiled: it counts in blocks of a mask that is never written out."""

    def mask(mask_mod, batch, heads, rows, columns, device):
        hidden = torch.zeros((), dtype=torch.bool, device=device)
        return hidden.expand(batch or 1, heads or 1, rows, columns)

    def blocks(mask, Q_BLOCK_SIZE, KV_BLOCK_SIZE, separate_full_blocks):
        shape = -(-mask.size(2) // Q_BLOCK_SIZE), -(-mask.size(3) // KV_BLOCK_SIZE)
        counted = [mask.new_zeros(*mask.shape[:2], *shape, dtype=torch.int8) for _ in range(2)]
        return counted if separate_full_blocks else (counted[0], None)

    rows = (module, "create_mask", mask), (module, "_convert_mask_to_block_mask", blocks)
    with replaced(*rows):
        return module.create_block_mask(*args, **kwargs)


def _learned(function, seen: set) -> tuple[torch.Tensor, ...]:
    """The tensors with gradients that a function, and those that it calls, hold: a learned bias."""
    if id(function) in seen or not inspect.isfunction(function):
        return ()
    seen.add(id(function))
    trained: dict[int, torch.Tensor] = {}
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            held = cell.cell_contents
            tensors = [held] if isinstance(held, torch.Tensor) else _learned(held, seen)
            trained |= {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
    return tuple(trained.values())


# ---------------------------------------------------------------------- on the card


def run(mode, operator, args, kwargs):
    """What an operator that takes functions gives, made under a `memlab.card.card_mode.CardMode`.

    Raises NotSimulated for all but flex_attention.
    """
    if operator not in (operators.flex_attention, operators.flex_attention_backward):
        raise NotSimulated(f"{operator.name()} is not simulated: write what its functions do")
    with under(mode):
        if operator is operators.flex_attention and args[6].get(FUSED):
            return _forward(mode, *args)
        if operator is operators.flex_attention_backward:
            if args[11].get(FUSED):
                return _backward(mode, *args)
            args = (*args[:8], _gradient_of_scores(args[7]), *args[9:])
        kernel = operator.py_kernels[DispatchKey.CompositeExplicitAutograd]
        return kernel(*args, **kwargs)


@contextlib.contextmanager
def under(mode):
    """A dispatch mode once more, without what entering it does once."""
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode(getattr(mode, "_mode_key", None))


def _forward(mode, query, key, value, score_mod, block_mask, scale, options, *rest):
    """The result, its logsumexp and the largest scores.

    The kernel writes these in any case; compiled code keeps them where they are asked for.
    """
    out = _laid_out_as(query, (*query.shape[:-1], value.size(-1)))
    rows = [query.new_empty(query.shape[:-1], dtype=torch.float32) for _ in range(2)]
    sizes = query.size(-1) + value.size(-1)
    again = mode.tracer.phase() == Phase.BACKWARD
    _note(mode, query, key, 2 * sizes, (query, key, value, out, *rows), again)
    largest = rows[1] if options.get("OUTPUT_MAX") else rows[1].new_empty(0)
    return out, rows[0], largest


def _backward(mode, query, key, value, out, logsumexp, grad_out, grad_logsumexp, *rest):
    """The gradients, beside the sums of `out * grad_out` over a head and what else is of rows.

    NB: the kernel may free `out` before it makes the gradients; here it lives until they are there.
    """
    learned = rest[5] if len(rest) > 5 else ()
    rows = [query.new_empty(query.shape[:-1], dtype=torch.float32)]
    if grad_logsumexp is not None:
        rows.append(torch.empty_like(rows[0]))
    shapes = [(len(query), *x.shape[1:]) for x in (key, value)]  # keys may be shared by the batch
    grads = [_laid_out_as(query, query.shape), *map(_laid_out_as, (key, value), shapes)]
    sizes = 3 * query.size(-1) + 2 * value.size(-1)
    moved = query, key, value, out, grad_out, *rows, *grads
    _note(mode, query, key, 2 * sizes, moved, again=False)
    if len(key) < len(query):
        grads[1:] = [grad.sum(0, keepdim=True) for grad in grads[1:]]
    of_learned = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in learned]
    return *grads, tuple(of_learned)


def _laid_out_as(like, shape):
    """A tensor of a shape whose dimensions lie in memory in the order of another's."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    out = like.new_empty([shape[place] for place in order])
    return out.permute([order.index(place) for place in range(like.dim())])


def _note(mode, query, key, flops_of_pair, tensors, again) -> None:
    """Count a kernel of the step. tensors: what it reads and writes, once each."""
    flops = flops_of_pair * query.shape[:-1].numel() * key.size(-2)
    dtype = str(query.dtype).removeprefix("torch.")
    moved = tuple(sorted(tensor.nbytes for tensor in tensors))
    mode.work.add(Work(flops, dtype, moved=moved, phase=mode.tracer.phase(), recomputed=again))


def _gradient_of_scores(score_mod):
    """The gradient that PyTorch traces from the scores' function, derived where it is wanted."""

    def gradient(score, batch, head, row, column, grad):
        pulled: Any = torch.func.vjp(lambda x: score_mod(x, batch, head, row, column), score)
        return [*pulled[1](grad), None, None, None, None]

    return gradient
