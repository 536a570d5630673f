"""The values of tensors on the GPU: which are known, and what the others read as.

Integers, booleans and single numbers that come from the host keep their values on the GPU, through
every operation whose inputs are all known. Everything else has a stand-in value: a number reads as
1, a comparison as it comes out with 1, isnan and isinf as False. Output shapes that follow from
values are the subject of `memlab.card.dynamic_shapes`.

What is known is noted on the storage, so that all views share it:

- `_memlab_values`: the values, a flat tensor with data of the storage's length
- `_memlab_assumed`: the assumption that these values rest on; empty if they are exact
- `_memlab_reads`: what the elements of a boolean tensor with unknown values read as
- `_memlab_decided`: whether that reading holds on any GPU (see `is_decided`)
"""

import functools
import math
import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from memlab.trace.tensors import tensors_in

aten = torch.ops.aten
# Elements up to which values are kept. The token ids of any batch have fewer. The masks of
# [length, length] have more: they would cost time, and no shape follows from them.
MOST_KNOWN = 2**18


# ---------------------------------------------------------------------- known values


def values_of(tensor):
    """An ordinary tensor with the known values of a fake one; None if they are not known.

    It is a view of the values, so writing into it changes them. For an ordinary tensor, the tensor
    itself.
    """
    if not isinstance(tensor, FakeTensor):
        return tensor
    flat = getattr(tensor.untyped_storage(), "_memlab_values", None)
    if flat is None or flat.dtype != tensor.dtype:  # also for `.view(dtype)` of another dtype
        return None
    with no_dispatch():
        return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())


def set_constant(tensor, values, assumed="") -> None:
    """Note the values of a fake tensor: of up to MOST_KNOWN integers, or of one real number.

    Larger tensors and complex ones stay unknown.

    values: an ordinary tensor of the same shape.
    assumed: the assumption that the values rest on, empty for values of the user's program.
    """
    storage = tensor.untyped_storage()
    numbers = storage.nbytes() // tensor.itemsize  # of the whole storage, not of this view alone
    if tensor.is_complex() or numbers > (1 if tensor.is_floating_point() else MOST_KNOWN):
        return
    with no_dispatch():
        flat = torch.zeros(numbers, dtype=tensor.dtype)
        part = torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())
        part.copy_(values)
    storage._memlab_values, storage._memlab_assumed = flat, assumed


def drop_constant(tensor) -> None:
    """Forget the values of a fake tensor's storage."""
    storage = tensor.untyped_storage()
    if hasattr(storage, "_memlab_values"):
        del storage._memlab_values


def assumed_of(tensors) -> str:
    """The first assumption that the values of these tensors rest on; empty if they have none."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            assumed = getattr(tensor.untyped_storage(), "_memlab_assumed", "")
            if assumed:
                return assumed
    return ""


def run_on_values(func, args, kwargs):
    """Run an operation on the values of its arguments, which must all be known, on the host."""
    args, kwargs = tree_map_only(torch.Tensor, values_of, (args, kwargs))
    kwargs = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
    kwargs.pop("pin_memory", None)
    with no_dispatch():
        if func._opname in UNWRITTEN:  # whatever the memory holds reads as the stand-in
            return func(*args, **kwargs).fill_(1)
        if func is aten.histc.default:  # CUDA has a kernel for integers, the CPU has none
            return args[0].double().histc(*args[1:], **kwargs).to(args[0].dtype)
        if torch.Tag.nondeterministic_seeded in func.tags:
            before = torch.get_rng_state()  # drawing for the GPU must not disturb the host's draws
            try:
                return func(*args, **kwargs)
            finally:
                torch.set_rng_state(before)
        return func(*args, **kwargs)


UNWRITTEN = set("empty empty_like empty_strided new_empty new_empty_strided".split())


def propagate(func, args, kwargs, out) -> None:
    """Note the values of an operation's results, and of the tensors that it wrote into.

    args, kwargs: the arguments as they were before `placement.without_data`.
    out: the result.
    """
    if isinstance(out, FakeTensor) and out.dtype.is_floating_point and out.numel() > 1:
        return  # most operations: real numbers, whose values are never kept
    if func.namespace == "c10d":  # the schemas of collectives do not say which arguments they write
        _received(*args[:2])
        return
    writes = func._schema.is_mutable
    outs = out if isinstance(out, (list, tuple)) else (out,)
    if writes:
        _written(func, args, kwargs)
        return
    new = [
        (number, out)
        for number, out in enumerate(outs)
        if isinstance(out, FakeTensor)
        # A single real number is known if it is computed from known tensors. One that a factory
        # function makes, such as a random draw, reads as 1.
        and (not out.is_floating_point() or (out.numel() == 1 and _tensors(args, kwargs)))
        # A view of a storage with known values needs nothing.
        and not hasattr(out.untyped_storage(), "_memlab_values")
    ]
    if not new:
        return
    if all_known(args, kwargs) and all(m.numel() <= MOST_KNOWN for _, m in new):
        results = run_on_values(func, args, kwargs)
        results = results if isinstance(results, (list, tuple)) else (results,)
        assumed = assumed_of(_tensors(args, kwargs))
        for number, output in new:
            set_constant(output, results[number], assumed)
        return
    if func is aten.topk.default:
        even_routing(args, kwargs, outs[1])
    if func in DECIDES and _decided(func, args):
        with no_dispatch():
            set_constant(out, torch.full(out.shape, DECIDES[func], dtype=out.dtype))
        return
    # Unknown: note what a condition reads as while its inputs are still at hand.
    for _, output in new:
        if output.dtype == torch.bool:
            data: Any = output.untyped_storage()
            data._memlab_reads, data._memlab_decided = stand_in(func, args), _decides(func, args)


# The value which decides the result of an operator if one side has it in every element: 0 for AND,
# 1 for OR.
DECIDES = {
    aten.bitwise_and.Tensor: 0,
    aten.logical_and.default: 0,
    aten.bitwise_or.Tensor: 1,
    aten.logical_or.default: 1,
}


def _decided(func, args) -> bool:
    sides = [values_of(side) for side in args if isinstance(side, torch.Tensor)]
    with no_dispatch():
        return any(
            side is not None
            # Only booleans decide an OR: the other side may add further bits to an integer 1.
            and (side.dtype == torch.bool or DECIDES[func] == 0)
            and bool((side == DECIDES[func]).all())
            for side in sides
        )


def _written(func, args, kwargs) -> None:
    """Update the values of the tensors that an operation has written into.

    They stay known if all of its inputs are known.
    """
    written = tensors_in(written_by(func, args, kwargs))
    written = [tensor for tensor in written if isinstance(tensor, FakeTensor)]
    for tensor in written:
        data: Any = tensor.untyped_storage()
        if hasattr(data, "_memlab_decided"):
            data._memlab_decided = _decides(func, args)
        # A storage has one reading. If only a part was written, and reads otherwise than the rest,
        # the storage reads as True, as other unknown conditions do.
        if tensor.dtype == torch.bool:
            before, after = _counts_as(tensor), _reads_when_written(func, args)
            data._memlab_reads = (
                after if before == after or tensor.nbytes == data.nbytes() else True
            )
    tensors = [tensor for tensor in written if values_of(tensor) is not None]
    if not tensors:
        return
    if all_known(args, kwargs):
        run_on_values(func, args, kwargs)  # `values_of` gives views, so this updates the values
    else:
        for tensor in tensors:
            drop_constant(tensor)


def written_by(func, args, kwargs) -> list:
    """The arguments that an operator writes into."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_places(func)]


@functools.cache
def _written_places(func) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]


def _received(outs, sent) -> None:
    """Note the values that a collective has received: every other rank sends what this rank sends.

    Without tensors to send, as in a sum over ranks in place, the values stay as they are.
    """
    received = [out for out in _tensors(outs) if isinstance(out, FakeTensor)]
    received = [out for out in received if values_of(out) is not None]
    values = [values_of(tensor) for tensor in _tensors(sent)]
    if not received or not values:
        return
    if any(value is None for value in values):
        for out in received:
            drop_constant(out)
        return
    with no_dispatch():
        flat, start = torch.cat([value.flatten() for value in values]), 0
        # Outputs of an all-gather repeat what was sent, those of a scatter are parts of it.
        for out in received if len(flat) else ():
            numbers = torch.arange(start, start + out.numel()) % len(flat)
            values_of(out).copy_(flat[numbers].view(out.shape))
            start += out.numel()


def _reads_when_written(func, args) -> bool:
    """What a boolean tensor reads as after an operation such as `|=` has written into it."""
    if func is aten.copy_.default:
        return bool(_counts_as(args[1]))
    # The reading of the operator that is not in place: of `bitwise_or` for `bitwise_or_`.
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    return bool(stand_in(getattr(getattr(aten, name.rstrip("_"), None), overload, func), args))


def _tensors(*arguments):
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def all_known(args, kwargs) -> bool:
    """Whether all values are known, of integers, booleans and single numbers only."""
    return all(
        values_of(tensor) is not None and (not tensor.is_floating_point() or tensor.numel() == 1)
        for tensor in _tensors(args, kwargs)
    )


def even_routing(args, kwargs, indices) -> None:
    """Spread the indices of a top-k of unknown values evenly over the choices.

    The router of a mixture of experts is such a top-k: every expert gets its share of the tokens.
    """
    tensor, k = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if tensor.dim() == 0 or indices.numel() > MOST_KNOWN:
        return
    with no_dispatch():
        order = torch.arange(indices.numel()) % tensor.size(dim)  # 0, 1, ..., n - 1, 0, 1, ...
        rows = order.view(*indices.movedim(dim, -1).shape) if k else order
        set_constant(
            indices, rows.movedim(-1, dim), "top-k of values that are not known: chosen evenly"
        )


# ---------------------------------------------------------------------- stand-in values


def item_value(tensor):
    """The result of `.item()`: the value if it is known, else its stand-in."""
    values = values_of(tensor)
    if values is None:
        return stand_in_number(tensor)
    with no_dispatch():
        return values.item()


# Operators whose boolean result reads the same whatever their inputs are.
FIXED = {
    **dict.fromkeys("isnan isinf isposinf isneginf new_zeros zeros_like".split(), False),
    # `_is_all_true` guards against invalid arguments: code raises an error if it is False.
    **dict.fromkeys(("new_ones", "ones_like", "_is_all_true"), True),
}
# Operators by name, whatever their overload: a tensor may be compared with a tensor or a number.
COMPARISONS = {name: getattr(operator, name) for name in "eq ne lt le gt ge".split()}
LOGICAL = {
    **dict.fromkeys(("logical_and", "bitwise_and", "mul"), operator.and_),
    **dict.fromkeys(("logical_or", "bitwise_or"), operator.or_),
    **dict.fromkeys(("logical_xor", "bitwise_xor"), operator.xor),
}
NEGATIONS = {aten.logical_not.default, aten.bitwise_not.default}


def stand_in(func, args) -> bool:
    """What an operator's boolean result reads as if its values are not known."""
    first = args[0] if args else None
    name = func._opname
    if name in FIXED:
        return FIXED[name]
    if name in COMPARISONS or name in LOGICAL:
        sides = [_counts_as(x) if isinstance(x, torch.Tensor) else x for x in args[:2]]
        if name in LOGICAL:
            return LOGICAL[name](*map(bool, sides))
        return COMPARISONS[name](*sides)
    if func in NEGATIONS:
        return not _counts_as(first)
    # Any other operator, such as `any`, `all`, `view`, or `cat` of a list: as its boolean inputs
    # read if they agree, else True.
    parts = first if isinstance(first, (list, tuple)) else [first]
    readings = [_counts_as(part) for part in parts if getattr(part, "dtype", None) == torch.bool]
    return readings[0] if readings and all(part == readings[0] for part in readings) else True


def _counts_as(tensor):
    """What any element of a tensor reads as: its known value if all elements share it."""
    if tensor.numel() == 1:
        return item_value(tensor)
    values = values_of(tensor)
    if values is not None and tensor.numel():
        with no_dispatch():
            first = values.flatten()[0]
            if bool((values == first).all()):
                return first.item()
    return stand_in_number(tensor)


def stand_in_number(tensor):
    """What an element with an unknown value reads as: 1, or what is noted on a boolean storage."""
    if tensor.dtype == torch.bool:
        return getattr(tensor.untyped_storage(), "_memlab_reads", True)
    if tensor.is_complex():
        return 1 + 0j
    return 1.0 if tensor.is_floating_point() else 1


def _decides(func, args) -> bool:
    """Whether a boolean result follows from numbers being finite, as all numbers are taken to be.

    PyTorch decomposes `isnan(x)` into `x != x`, and `isfinite` into a comparison with infinity.
    """
    if func._opname in FIXED or (func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]):
        return True
    compared = func._opname in COMPARISONS and args[1]
    if isinstance(compared, float) and not math.isfinite(compared):
        return True
    tensors = _tensors(args)
    return bool(tensors) and all(t.dtype == torch.bool and is_decided(t) for t in tensors)


def is_decided(tensor) -> bool:
    """Whether a tensor reads as it would on any GPU: known values, or a check for finite ones."""
    return values_of(tensor) is not None or getattr(
        tensor.untyped_storage(), "_memlab_decided", False
    )


def read_alike(tensor, other) -> bool:
    """The result of `torch.equal` and `torch.allclose` if values are not known."""
    if tensor.dtype == other.dtype == torch.bool and _counts_as(tensor) != _counts_as(other):
        return False
    return tensor.shape == other.shape
