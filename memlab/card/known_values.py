"""What is known of the values of tensors on the card, and what stands for the rest.

Integers, booleans and single numbers that come from the host keep their values on the card, through
every operation on such alone. Everything else has a stand-in value: a number reads as 1, a
comparison as it would come out of that, isnan and isinf as False. Shapes that follow:
`memlab.card.dynamic_shapes`.
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
MOST_KNOWN = 2**18  # numbers: the tokens of any batch, and no masks of token by token


# ---------------------------------------------------------------------- known values


def values_of(tensor):
    """An ordinary tensor with the values of one on the card; None where they are not known.

    It shares their memory: what is written into it, is written. An ordinary tensor is its own.
    """
    if not isinstance(tensor, FakeTensor):
        return tensor
    flat = getattr(tensor.untyped_storage(), "_memlab_values", None)
    if flat is None or flat.dtype != tensor.dtype:
        return None
    with no_dispatch():
        return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())


def set_constant(tensor, values, assumed="") -> None:
    """From now on the values of a fake tensor are known: of not too many integers, or one number.

    values: an ordinary tensor of its shape. assumed: what they rest on, where they are not the
    reader's own.
    """
    storage = tensor.untyped_storage()
    numbers = storage.nbytes() // tensor.itemsize
    if tensor.is_complex() or numbers > (1 if tensor.is_floating_point() else MOST_KNOWN):
        return
    with no_dispatch():
        flat = torch.zeros(numbers, dtype=tensor.dtype)
        part = torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())
        part.copy_(values)
    storage._memlab_values, storage._memlab_assumed = flat, assumed


def drop_constant(tensor) -> None:
    """The values of a fake tensor are not known any more."""
    storage = tensor.untyped_storage()
    if hasattr(storage, "_memlab_values"):
        del storage._memlab_values


def assumed_of(tensors) -> str:
    """What the values of these rest on; empty where they are all the reader's own."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            assumed = getattr(tensor.untyped_storage(), "_memlab_assumed", "")
            if assumed:
                return assumed
    return ""


def run_on_values(func, args, kwargs):
    """The operation on the values of its arguments, which are all known, without the card."""
    args, kwargs = tree_map_only(torch.Tensor, values_of, (args, kwargs))
    kwargs = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
    kwargs.pop("pin_memory", None)
    with no_dispatch():
        if func._opname in UNWRITTEN:
            return func(*args, **kwargs).fill_(1)
        if func is aten.histc.default:  # of integers: the CPU has none
            return args[0].double().histc(*args[1:], **kwargs).to(args[0].dtype)
        if torch.Tag.nondeterministic_seeded in func.tags:
            before = torch.get_rng_state()  # the host's own draws stay what they are
            try:
                return func(*args, **kwargs)
            finally:
                torch.set_rng_state(before)
        return func(*args, **kwargs)


UNWRITTEN = set("empty empty_like empty_strided new_empty new_empty_strided".split())


def propagate(func, args, kwargs, out) -> None:
    """Take down what is known of the values of an operation's result, or of what it wrote into."""
    if isinstance(out, FakeTensor) and out.dtype.is_floating_point and out.numel() > 1:
        return  # the most
    if func.namespace == "c10d":  # whose schemas do not say what they write
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
        and (not out.is_floating_point() or (out.numel() == 1 and _tensors(args, kwargs)))
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
    for _, output in new:
        if output.dtype == torch.bool:
            data: Any = output.untyped_storage()
            data._memlab_reads, data._memlab_decided = stand_in(func, args), _decides(func, args)


DECIDES = {  # what one side has everywhere decides the result, whatever the other has
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
            and (side.dtype == torch.bool or DECIDES[func] == 0)
            and bool((side == DECIDES[func]).all())
            for side in sides
        )


def _written(func, args, kwargs) -> None:
    """What was written into is known if all that took part is."""
    written = tensors_in(written_by(func, args, kwargs))
    written = [tensor for tensor in written if isinstance(tensor, FakeTensor)]
    for tensor in written:
        data: Any = tensor.untyped_storage()
        if hasattr(data, "_memlab_decided"):
            data._memlab_decided = _decides(func, args)
        if tensor.dtype == torch.bool:
            before, after = _counts_as(tensor), _reads_when_written(func, args)
            data._memlab_reads = (
                after if before == after or tensor.nbytes == data.nbytes() else True
            )
    tensors = [tensor for tensor in written if values_of(tensor) is not None]
    if not tensors:
        return
    if all_known(args, kwargs):
        run_on_values(func, args, kwargs)
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
    """What a collective writes: every other rank sends what this one has.

    Where nothing else was sent, as in a sum over ranks, what is there stays.
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
        for out in received if len(flat) else ():
            numbers = torch.arange(start, start + out.numel()) % len(flat)
            values_of(out).copy_(flat[numbers].view(out.shape))
            start += out.numel()


def _reads_when_written(func, args) -> bool:
    """What a boolean tensor reads as, once an operation such as `|=` has written into it."""
    if func is aten.copy_.default:
        return bool(_counts_as(args[1]))
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    return bool(stand_in(getattr(getattr(aten, name.rstrip("_"), None), overload, func), args))


def _tensors(*arguments):
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def all_known(args, kwargs) -> bool:
    """Whether all values are known and integers, or single numbers."""
    return all(
        values_of(tensor) is not None and (not tensor.is_floating_point() or tensor.numel() == 1)
        for tensor in _tensors(args, kwargs)
    )


def even_routing(args, kwargs, indices) -> None:
    """Let the indices of a top-k of unknown values spread evenly over what can be chosen.

    The router of an expert mixture is such a top-k: every expert gets its share of the tokens.
    """
    tensor, k = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if tensor.dim() == 0 or indices.numel() > MOST_KNOWN:
        return
    with no_dispatch():
        order = torch.arange(indices.numel()) % tensor.size(dim)
        rows = order.view(*indices.movedim(dim, -1).shape) if k else order
        set_constant(
            indices, rows.movedim(-1, dim), "top-k of values that are not known: chosen evenly"
        )


# ---------------------------------------------------------------------- stand-in values


def item_value(tensor):
    """What `.item()` gives: the value if it is known, else the one that stands for it."""
    values = values_of(tensor)
    if values is None:
        return stand_in_number(tensor)
    with no_dispatch():
        return values.item()


FIXED = {
    **dict.fromkeys("isnan isinf isposinf isneginf new_zeros zeros_like".split(), False),
    # The last is asked by code that raises where it is not.
    **dict.fromkeys(("new_ones", "ones_like", "_is_all_true"), True),
}
# By the names of operators, of tensors and numbers alike.
COMPARISONS = {name: getattr(operator, name) for name in "eq ne lt le gt ge".split()}
LOGICAL = {
    **dict.fromkeys(("logical_and", "bitwise_and", "mul"), operator.and_),
    **dict.fromkeys(("logical_or", "bitwise_or"), operator.or_),
    **dict.fromkeys(("logical_xor", "bitwise_xor"), operator.xor),
}
NEGATIONS = {aten.logical_not.default, aten.bitwise_not.default}


def stand_in(func, args) -> bool:
    """What a boolean result reads as that is not known."""
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
    parts = first if isinstance(first, (list, tuple)) else [first]  # of a `cat` or a `stack`
    readings = [_counts_as(part) for part in parts if getattr(part, "dtype", None) == torch.bool]
    return readings[0] if readings and all(part == readings[0] for part in readings) else True


def _counts_as(tensor):
    """What an element of a tensor of any size counts as."""
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
    """What an element reads as that is not known."""
    if tensor.dtype == torch.bool:
        return getattr(tensor.untyped_storage(), "_memlab_reads", True)
    if tensor.is_complex():
        return 1 + 0j
    return 1.0 if tensor.is_floating_point() else 1


def _decides(func, args) -> bool:
    """Whether a boolean result follows from numbers being finite, which they all are.

    `isfinite` and `isnan` are comparisons where PyTorch takes them apart.
    """
    if func._opname in FIXED or (func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]):
        return True
    compared = func._opname in COMPARISONS and args[1]
    if isinstance(compared, float) and not math.isfinite(compared):
        return True
    tensors = _tensors(args)
    return bool(tensors) and all(t.dtype == torch.bool and is_decided(t) for t in tensors)


def is_decided(tensor) -> bool:
    """Whether a tensor reads as it does on any card: of known values, or whether it is finite."""
    return values_of(tensor) is not None or getattr(
        tensor.untyped_storage(), "_memlab_decided", False
    )


def read_alike(tensor, other) -> bool:
    """What `torch.equal` and `torch.allclose` give of values that are not known."""
    if tensor.dtype == other.dtype == torch.bool and _counts_as(tensor) != _counts_as(other):
        return False
    return tensor.shape == other.shape
