"""Operations of a card whose result's shape follows from values."""

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from memlab.card import dynamic_shapes, known_values

aten = torch.ops.aten


class ByValues:
    """The part of a card's tracer that finds such shapes."""

    def _shaped_by_values(self, func, args, kwargs, tensors):
        """The result of an operation whose shape follows from values."""
        self.operation = func
        if all(known_values.values_of(tensor) is not None for tensor in tensors):
            results = known_values.run_on_values(func, args, kwargs)
            assumed = known_values.assumed_of(tensors)
        else:
            results, assumed = dynamic_shapes.largest(func, args, kwargs)
        if assumed:
            self.assumptions[assumed] = None

        def card_tensor(result):
            made = self._fake(result)
            self.see_result(made)
            if result.device.type != "meta":
                known_values.set_constant(made, result, assumed)
            return made

        made = tree_map_only(torch.Tensor, card_tensor, results)
        self._take_scratch(func, args, made)
        return made

    def _without_masks(self, args, position):
        """The arguments of an indexing, with the places where a mask is true for every mask.

        As CUDA's kernels have it: `expandTensors` in aten/src/ATen/native/IndexingUtils.h.
        """
        indices = []
        for index in args[position]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            places = self.__torch_dispatch__(aten.nonzero.default, (), (index,))
            for column in range(index.dim()):
                one = self.__torch_dispatch__(aten.select.int, (), (places, 1, column))
                indices.append(one)
        return (*args[:position], indices, *args[position + 1 :])

    def _select_by_mask(self, tensor, mask):
        """aten/src/ATen/native/cuda/IndexKernel.cpp: `masked_select_out_cuda_impl`."""
        shape = list(torch.broadcast_shapes(tensor.shape, mask.shape))
        tensor, mask = (
            self.__torch_dispatch__(aten.expand.default, (), (each, shape))
            for each in (tensor, mask)
        )
        return self.__torch_dispatch__(aten.index.Tensor, (), (tensor, [mask]))

    def _pack(self, tensor, lengths, batch_first):
        """The tokens of padded sequences one after the other, and how many there are at each step.

        aten/src/ATen/native/PackedSequence.cpp: a copy of each step's, then one of all. The lengths
        lie on the host, in falling order.
        """
        with no_dispatch():
            steps = [int((lengths > step).sum()) for step in range(int(lengths.max()))]
        rest = tensor.shape[2:]
        shape = (sum(steps), *rest)
        with no_dispatch():
            like = torch.empty(shape, dtype=tensor.dtype, device="meta")
            sizes = torch.tensor(steps)
        self.operation = aten._pack_padded_sequence.default
        self._take_and_give_back(like.nbytes)
        packed = self._fake(like)
        self.see_result(packed)
        return packed, sizes
