"""Operations on the GPU whose output shape follows from values: nonzero, boolean masks, unique.

The shape is exact if all values are known (`memlab.card.known_values`). Otherwise the output is
the largest possible one (`memlab.card.dynamic_shapes`), and the assumption is noted.
"""

import itertools

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from memlab.card import dynamic_shapes, known_values
from memlab.card.kernels.taken import KernelMemory
from memlab.card.placement import fake_like
from memlab.card.refusals import scalar
from memlab.trace.tensors import on_card

aten = torch.ops.aten


class ByValues:
    """Runs operations whose output shape follows from values.

    mode: a `memlab.card.card_mode.CardMode`.
    """

    def __init__(self, mode, kernels: KernelMemory):
        self._mode, self._tracer, self._kernels = mode, mode.tracer, kernels

    def run(self, func, args, kwargs, tensors):
        """The result of an operation of `dynamic_shapes.LARGEST`, allocated on the GPU."""
        self._tracer.operation = func
        if all(known_values.values_of(tensor) is not None for tensor in tensors):
            results = known_values.run_on_values(func, args, kwargs)
            assumed = known_values.assumed_of(tensors)
        else:
            results, assumed = dynamic_shapes.largest(func, args, kwargs)
        if assumed:
            self._tracer.assumptions[assumed] = None

        def card_tensor(result):
            result_on_card = fake_like(self._mode.fake, result)
            self._tracer.see(result_on_card)
            if result.device.type != "meta":  # computed from known values
                known_values.set_constant(result_on_card, result, assumed)
            return result_on_card

        on_card = tree_map_only(torch.Tensor, card_tensor, results)
        self._kernels.take_scratch(func, args, on_card)
        return on_card

    def without_masks(self, tensor, masks, *rest):
        """The arguments of an indexing operation, with every boolean mask turned into indices.

        As PyTorch does on CUDA (aten/src/ATen/native/IndexingUtils.h, `expandTensors`): one
        `nonzero` per mask, [true elements, dims of the mask], then one column of it per dimension.
        """
        indices: list = []
        for index in masks:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            _check_shape(index, tensor, len(indices))
            # Through the mode, so that the int64 indices are allocated and their shape is assumed.
            places = self._mode.__torch_dispatch__(aten.nonzero.default, (), (index,))
            for column in range(index.dim()):
                places_in_column = self._mode.__torch_dispatch__(
                    aten.select.int, (), (places, 1, column)
                )
                indices.append(places_in_column)
        return tensor, indices, *rest

    def select_by_mask(self, tensor, mask):
        """`masked_select`: expand both, then index by the mask.

        aten/src/ATen/native/cuda/IndexKernel.cpp, `masked_select_out_cuda_impl`.
        """
        shape = list(torch.broadcast_shapes(tensor.shape, mask.shape))
        tensor, mask = (
            self._mode.__torch_dispatch__(aten.expand.default, (), (each, shape))
            for each in (tensor, mask)
        )
        return self._mode.__torch_dispatch__(aten.index.Tensor, (), (tensor, [mask]))

    def pack(self, tensor, lengths, batch_first):
        """`_pack_padded_sequence`: the tokens without padding, and how many each time step has.

        aten/src/ATen/native/PackedSequence.cpp takes the steps that have equally many sequences as
        one block. It copies each block that is not contiguous, then concatenates the blocks. The
        lengths must be an int64 tensor on the host (`checkLongTensor`), in decreasing order.

        Raises RuntimeError, in PyTorch's words, for lengths on the GPU.
        """
        if on_card(lengths):
            raise RuntimeError(
                f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D "
                f"cuda:0 {scalar(lengths)} tensor"
            )
        with no_dispatch():
            steps = [int((lengths > step).sum()) for step in range(int(lengths.max()))]
        rest = tensor.shape[2:]
        shape = (sum(steps), *rest)
        with no_dispatch():
            like = torch.empty(shape, dtype=tensor.dtype, device="meta")
            sizes = torch.tensor(steps)
            padded = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
            blocks = _blocks(padded.transpose(0, 1) if batch_first else padded, steps)
            numbers = [block.numel() for block in blocks if not block.is_contiguous()]
        self._tracer.operation = aten._pack_padded_sequence.default
        # The copies live until the result is filled.
        with self._kernels.taken(*(count * tensor.itemsize for count in numbers)):
            packed = fake_like(self._mode.fake, like)
            self._tracer.see(packed)
        return packed, sizes


def _blocks(padded, steps) -> list[torch.Tensor]:
    """The blocks of `_pack_padded_sequence`, out of [steps, sequences, ...].

    steps: how many sequences each step has.
    """
    blocks, first = [], 0
    for sequences, equal in itertools.groupby(steps):
        last = first + len(list(equal))
        blocks.append(padded[first:last, :sequences])
        first = last
    return blocks


def _check_shape(mask, tensor, first) -> None:
    """Raise IndexError unless a mask has the shape of the dimensions that it indexes.

    first: the first of these dimensions.
    """
    for dim, size in enumerate(mask.shape):
        if tensor.shape[first + dim : first + dim + 1] != (size,):
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {dim} does not match the shape "
                f"of the indexed tensor {list(tensor.shape)} at index {first + dim}"
            )
