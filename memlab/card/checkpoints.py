"""Saving and loading checkpoints while a GPU is simulated.

Tensors without data are written as zeros that take no room on the disk, or as their values if these
are known. Files are read with the data that they contain; tensors for the GPU then move there and
lose their data. `torch.save`, `torch.load` and safetensors are covered.
"""

import contextlib
import json
import mmap
import sys
import warnings
from typing import Any

import torch
from safetensors import torch as safetensors
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from memlab.card.known_values import values_of
from memlab.card.placement import is_cuda_device, with_data
from memlab.trace.patches import replaced
from memlab.trace.tensors import on_card


@contextlib.contextmanager
def checkpoints():
    """Let torch.save, torch.load and safetensors' functions accept tensors without data.

    In a file of torch.save, a tensor of zeros is one element that is expanded to the tensor's
    shape. In a safetensors file, it is a hole in a sparse file. Neither takes room. Tensors that
    lay on the GPU return there on loading, unless `map_location` says otherwise.
    """
    with replaced(
        (FakeTensor, "__reduce_ex__", _as_zeros),
        (torch.serialization, "location_tag", _location_of),
        (torch, "load", _load),
        # Storages on meta all have address 0, but libraries tell by the address which weights are
        # tied. So each gets an address of its own.
        (torch.UntypedStorage, "data_ptr", _address_of),
        (torch.UntypedStorage, "copy_", _copied_into),
        *_names_in_libraries(),
    ):
        yield


# The originals, which the replacements call.
_read = torch.load
_write, _read_file = safetensors.save_file, safetensors.load_file
_open_file = safetensors.safe_open
_tag, _address = torch.serialization.location_tag, torch.UntypedStorage.data_ptr
_copy_into: Any = torch.UntypedStorage.copy_


# Names by which libraries import safetensors' functions.
NAMES = {"save_file", "load_file", "safe_save_file", "safe_load_file", "safe_open"}


def _names_in_libraries():
    """Rows for `replaced`: every name by which a module has imported a safetensors function.

    `from safetensors.torch import save_file` copies the function, so replacing it in safetensors
    would not reach transformers, accelerate or peft.
    """
    replaced_by = (_write, _save_file), (_read_file, _load_file), (_open_file, _open)
    for module in list(sys.modules.values()):
        named = getattr(module, "__dict__", {})
        if not named.keys().isdisjoint(NAMES):
            for name in NAMES & named.keys():
                yield from ((module, name, to) for own, to in replaced_by if named[name] is own)


def _plain(tensor):
    """An ordinary tensor with a fake tensor's shape: its known values, or an expanded zero.

    Its storage remembers whether the tensor lay on the GPU. Tied weights give the same zero, so
    that they stay tied in the file.
    """
    values, data = values_of(tensor), tensor.untyped_storage()
    with with_data():
        if values is None:
            zeros = data.__dict__.setdefault("_memlab_zeros", {})
            zero = zeros.setdefault(_which(tensor), torch.zeros((), dtype=tensor.dtype))
            values = zero.expand(tensor.shape)
        values = values.clone() if values.numel() == 1 else values
        values.untyped_storage()._memlab_from_card = on_card(tensor)
    return values


def _which(tensor) -> tuple:
    """What identifies a tensor within its storage. Tied weights have equal keys."""
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _as_zeros(tensor, protocol):
    plain = _plain(tensor)
    with with_data():
        if getattr(tensor, "_is_param", False):
            plain = torch.nn.Parameter(plain, tensor.requires_grad)
        return plain.__reduce_ex__(protocol)


def _address_of(storage):
    return storage._cdata if storage.device.type == "meta" else _address(storage)


def _copied_into(storage, source, *args, **kwargs):
    """`UntypedStorage.copy_`, which asynchronous saving uses to stage tensors on the host."""
    return storage if source.device.type == "meta" else _copy_into(storage, source, *args, **kwargs)


def _location_of(storage):
    untyped = getattr(storage, "_untyped_storage", storage)
    return "cuda:0" if getattr(untyped, "_memlab_from_card", False) else _tag(storage)


def _load(f, map_location=None, *args, **kwargs):
    """`torch.load`, which would restore tensors of the GPU by asking the driver for memory.

    All storages are first loaded on the host. `place`, a callable `map_location`, finds out which
    of them belong on the GPU, and their tensors move there afterwards.
    """
    for_card = []  # storages; kept alive, so that their addresses stay unique

    def to_card(storage, *device, **settings):
        for_card.append(storage)
        return storage

    def place(storage, location):
        mapped = map_location
        if callable(mapped):
            mapped = mapped(storage, location)
        elif isinstance(mapped, dict):
            mapped = mapped.get(location)
        if isinstance(mapped, torch.UntypedStorage):
            # The user's function returned a storage; `storage.cuda()` has noted it in `to_card`.
            return storage
        if str(mapped or location).startswith("cuda"):
            to_card(storage)
        return storage

    with with_data(), replaced((torch.UntypedStorage, "cuda", to_card)):
        loaded = _read(f, place, *args, **kwargs)
    card = {storage._cdata for storage in for_card}
    there: dict[tuple, torch.Tensor] = {}  # part of a storage -> its tensor on the GPU

    def move(tensor):
        storage = tensor.untyped_storage()._cdata
        if storage not in card:
            return tensor
        which = (storage, *_which(tensor))
        if which not in there:  # tied weights move once, and stay one tensor
            there[which] = tensor.to("cuda")
        return there[which]

    def moved(tensor):
        return tensor._apply(move) if isinstance(tensor, torch.nn.Module) else move(tensor)

    return tree_map_only((torch.Tensor, torch.nn.Module), moved, loaded)


def _load_file(filename, device="cpu", **kwargs):
    with with_data():
        loaded = _read_file(filename, **kwargs)
    return {name: tensor.to(device) for name, tensor in loaded.items()}


def _open(filename, framework="pt", device="cpu", **settings):
    """safetensors' `safe_open`, which for a GPU would write to the device memory itself."""
    try:
        opened: Any = _open_file(filename, framework, **settings)
    except RuntimeError as error:
        if framework != "pt" or "unable to mmap" not in str(error):
            raise
        opened = _Large(filename)  # larger than this machine's memory
    return _ToCard(opened) if framework == "pt" and is_cuda_device(device) else opened


class _Large:
    """Replaces `safe_open` for a file that is larger than the host's memory.

    safetensors maps a file as writable memory, so the host must have as much memory as the file is
    long. This class maps it read-only, and pages are loaded when they are touched.

    The format: 8 bytes with the length of the header, the header in JSON, then the data.
    """

    def __init__(self, filename):
        with open(filename, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(self._bytes[:8], "little")
        self._header, self._begin = json.loads(self._bytes[8 : 8 + size]), 8 + size
        self._metadata = self._header.pop("__metadata__", None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None  # nothing is closed: tensors still refer to the mapping

    def metadata(self):
        return self._metadata

    def keys(self):
        return sorted(self._header)

    def offset_keys(self):
        return sorted(self._header, key=lambda name: self._header[name]["data_offsets"])

    def get_tensors(self):
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name):
        return _LargeSlice(self._header[name], self.get_tensor(name))

    def get_tensor(self, name):
        header = self._header[name]
        dtype: Any = safetensors._TYPES[header["dtype"]]
        shape = header["shape"]
        begin, end = header["data_offsets"]
        with with_data(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # frombuffer warns that the buffer is not writable
            if begin == end:  # frombuffer refuses a length of 0
                return torch.empty(shape, dtype=dtype)
            where = {"count": (end - begin) // dtype.itemsize, "offset": self._begin + begin}
            return torch.frombuffer(self._bytes, dtype=dtype, **where).view(shape)


class _LargeSlice:
    """Replaces the slice object of `safe_open`, for one tensor of the file."""

    def __init__(self, header, tensor):
        self._said, self._tensor = header, tensor

    def get_shape(self):
        return self._said["shape"]

    def get_dtype(self):
        return self._said["dtype"]

    def __getitem__(self, places):
        with with_data():
            return self._tensor[places]


class _ToCard:
    """Wraps an open safetensors file, or a slice of it, and moves what is read to the GPU."""

    def __init__(self, opened):
        self._opened = opened

    def __getattr__(self, name):
        return getattr(self._opened, name)

    def __enter__(self):
        self._opened.__enter__()
        return self

    def __exit__(self, *error):
        return self._opened.__exit__(*error)

    def get_tensor(self, name):
        return self.get_slice(name)[...]

    def get_slice(self, name):
        return _ToCard(self._opened.get_slice(name))

    def __getitem__(self, places):
        with with_data():
            part = self._opened[places]
        return part.to("cuda")


def _save_file(tensors, filename, metadata=None):
    """safetensors' `save_file`, for tensors of which some have no data.

    The format: github.com/huggingface/safetensors, README.md.
    """
    if not any(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
        return _write(tensors, filename, metadata)
    header, end = {"__metadata__": metadata} if metadata else {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        where = {"shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = {"dtype": _KINDS[tensor.dtype], **where}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    with open(filename, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            data = values_of(tensor)
            if data is None:
                file.seek(tensor.nbytes, 1)  # a hole, which reads as zeros
                continue
            with with_data():
                file.write(data.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        file.truncate(8 + len(text) + end)  # a hole at the end is not written otherwise


# dtype -> its name in a safetensors header.
_KINDS = {dtype: name for name, dtype in safetensors._TYPES.items()}
