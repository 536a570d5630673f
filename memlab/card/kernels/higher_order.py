"""Higher-order operators, which take functions as arguments; in practice `flex_attention`.

`torch.compile(flex_attention)` is one kernel, which is simulated here as one kernel: it saves no
scores (torch/_inductor/kernel/flex/flex_attention.py). Without torch.compile, PyTorch itself writes
out the whole matrix of scores, with a warning. That eager path runs here operation by operation.

Known limitations: `torch.cond`, loops, scans and all other higher-order operators are refused. A
fused kernel's time is that of scores without a mask. In its backward, `out` lives until all
gradients exist, where the kernel may free it earlier.
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

# The module, by its path: as an attribute of the package, the name means the operator.
operators = importlib.import_module("torch._higher_order_ops.flex_attention")

ASSUMED = "flex_attention: a kernel that keeps no scores; its time is that of scores without a mask"
# A key in flex_attention's `kernel_options`. PyTorch passes these on to the backward operator,
# where the key tells a fused forward from an eager one.
FUSED = "_memlab_fused"


class _Thread(threading.local):
    """fused: whether this thread is inside a compiled call of flex_attention."""

    fused = False


@contextlib.contextmanager
def functions_as_operators(all_fused: bool):
    """Mark every call of flex_attention as fused or eager; yields the state of the thread.

    all_fused: whether code that would be compiled runs eagerly. A call of flex_attention inside it
        would be compiled too, so every call counts as fused.

    Raises NotSimulated for an eager call whose `score_mod` uses a tensor that requires a gradient.
    """
    thread = _Thread()
    thread.fused = all_fused

    def flex_attention(query, key, value, score_mod, block_mask, scale, options, *rest):
        fused = all_fused or thread.fused
        # torch.compile finds a learned bias by tracing `score_mod`; here it is found in closures.
        learned = _learned(score_mod, set()) if torch.is_grad_enabled() else ()
        if learned and not fused:
            raise NotSimulated(
                "flex_attention with a learned bias is not simulated without torch.compile: "
                "write torch.compile(flex_attention)"
            )
        options = options | {FUSED: fused}
        # The learned tensors take the place of `score_mod_other_buffers`, the first of `rest`.
        return operators.flex_attention(
            query, key, value, score_mod, block_mask, scale, options, learned, *rest[1:]
        )

    rows = (
        (module, "flex_attention_hop", flex_attention),
        # PyTorch traces `score_mod` and its gradient for the compiled kernel, which is not built.
        (operators, "create_fw_bw_graph", lambda score_mod, *values: (score_mod, None)),
    )
    with replaced(*rows):
        yield thread


def compiled_form(function, thread: _Thread, assumptions: dict):
    """The replacement for `torch.compile(function)`, for flex_attention and create_block_mask.

    Returns None for any other function. thread: the value that `functions_as_operators` yielded.
    assumptions: a dict that gets a line at each compiled call of flex_attention.
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
    """`create_block_mask`, compiled: the dense mask is never written out.

    The blocks are counted as if nothing was hidden, in int8 tensors of one element per block.
    """

    # One element, expanded: the mask has the right shape and takes one byte.
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
    """The tensors that require a gradient in a function's closure, and in closures that it calls.

    seen: ids of the functions visited so far, because closures may refer to each other.
    """
    if id(function) in seen or not inspect.isfunction(function):
        return ()
    seen.add(id(function))
    trained: dict[int, torch.Tensor] = {}
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the variable of the cell has no value yet
            held = cell.cell_contents
            tensors = [held] if isinstance(held, torch.Tensor) else _learned(held, seen)
            trained |= {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
    return tuple(trained.values())


# ---------------------------------------------------------------------- on the card


def run(mode, operator, args, kwargs):
    """Run a higher-order operator under a `memlab.card.card_mode.CardMode`.

    Raises NotSimulated for all operators but flex_attention and its backward.
    """
    if operator not in (operators.flex_attention, operators.flex_attention_backward):
        raise NotSimulated(f"{operator.name()} is not simulated: write its operations out")
    # PyTorch takes a mode off the stack while the mode handles an operator. Here the mode must also
    # see the operations below.
    with under(mode):
        if operator is operators.flex_attention and args[6].get(FUSED):  # kernel_options
            return _forward(mode, *args)
        if operator is operators.flex_attention_backward:
            if args[11].get(FUSED):  # kernel_options
                return _backward(mode, *args)
            # args[7] is `score_mod`, args[8] its gradient, which has not been traced.
            args = (*args[:8], _gradient_of_scores(args[7]), *args[9:])
        # `sdpa_dense`, or `sdpa_dense_backward`: the eager path, in ordinary operations.
        kernel = operator.py_kernels[DispatchKey.CompositeExplicitAutograd]
        return kernel(*args, **kwargs)


@contextlib.contextmanager
def under(mode):
    """Push a dispatch mode that is already in use, without its `__enter__`."""
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode(getattr(mode, "_mode_key", None))


def _forward(mode, query, key, value, score_mod, block_mask, scale, options, *rest):
    """The fused forward: (result, logsumexp, largest score of each query).

    torch/_inductor/kernel/flex/flex_attention.py: the kernel always writes `logsumexp` and
    `max_scores`, both in fp32. The latter is freed again unless the caller asked for it.
    """
    out = _laid_out_as(query, (*query.shape[:-1], value.size(-1)))
    rows = [query.new_empty(query.shape[:-1], dtype=torch.float32) for _ in range(2)]
    sizes = query.size(-1) + value.size(-1)  # multiply-adds of one query and one key
    again = mode.tracer.phase() == Phase.BACKWARD
    _note(mode, query, key, 2 * sizes, (query, key, value, out, *rows), again)
    largest = rows[1] if options.get("OUTPUT_MAX") else rows[1].new_empty(0)
    return out, rows[0], largest


def _backward(mode, query, key, value, out, logsumexp, grad_out, grad_logsumexp, *rest):
    """The fused backward: the gradients of query, key, value, and of the learned tensors.

    torch/_inductor/kernel/flex/flex_attention.py: `delta` is the sum of `out * grad_out` over each
    head, one fp32 per query. `grad_lse_exp2` is of the same size, if logsumexp has a gradient.

    NB: the kernel may free `out` before it allocates the gradients; here `out` lives on.
    """
    learned = rest[5] if len(rest) > 5 else ()  # score_mod_other_buffers
    rows = [query.new_empty(query.shape[:-1], dtype=torch.float32)]
    if grad_logsumexp is not None:
        rows.append(torch.empty_like(rows[0]))
    # Keys and values may be shared by the batch. The kernel then writes one gradient per sequence;
    # they are summed below.
    shapes = [(len(query), *x.shape[1:]) for x in (key, value)]
    grads = [_laid_out_as(query, query.shape), *map(_laid_out_as, (key, value), shapes)]
    # The scores again, and the gradients of query and key; those of the weights and of the value.
    sizes = 3 * query.size(-1) + 2 * value.size(-1)
    moved = query, key, value, out, grad_out, *rows, *grads
    _note(mode, query, key, 2 * sizes, moved, again=False)
    if len(key) < len(query):
        grads[1:] = [grad.sum(0, keepdim=True) for grad in grads[1:]]
    of_learned = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in learned]
    return *grads, tuple(of_learned)


def _laid_out_as(like, shape):
    """An empty tensor of a shape, dense, with its dimensions in memory in the order of `like`."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    out = like.new_empty([shape[place] for place in order])
    return out.permute([order.index(place) for place in range(like.dim())])


def _note(mode, query, key, flops_of_pair, tensors, again) -> None:
    """Count a kernel of the step.

    flops_of_pair: operations for one query and one key. tensors: all that are read or written.
    again: whether activation checkpointing repeats the forward pass.
    """
    flops = flops_of_pair * query.shape[:-1].numel() * key.size(-2)
    dtype = str(query.dtype).removeprefix("torch.")
    moved = tuple(sorted(tensor.nbytes for tensor in tensors))
    mode.work.add(Work(flops, dtype, moved=moved, phase=mode.tracer.phase(), recomputed=again))


def _gradient_of_scores(score_mod):
    """The gradient of `score_mod`, derived on the fly; PyTorch would trace it beforehand."""

    def gradient(score, batch, head, row, column, grad):
        pulled: Any = torch.func.vjp(lambda x: score_mod(x, batch, head, row, column), score)
        return [*pulled[1](grad), None, None, None, None]

    return gradient
