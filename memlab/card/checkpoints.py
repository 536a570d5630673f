"""Checkpoints: written with zeros that take no room on the disk, read with what is in them."""

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
    """Let torch.save, torch.load and safetensors' save_file take tensors without data.

    A fake tensor is written as zeros, or as its values where they are known. With torch.save it is
    one zero that is expanded to the tensor's shape, with safetensors a hole in the file: neither
    takes room. What lay on the card comes back to the card, unless map_location says otherwise.
    """
    with replaced(
        (FakeTensor, "__reduce_ex__", _as_zeros),
        (torch.serialization, "location_tag", _location_of),
        (torch, "load", _load),
        # What lies nowhere has an address of its own all the same: libraries tell by it which
        # weights are tied.
        (torch.UntypedStorage, "data_ptr", _address_of),
        (torch.UntypedStorage, "copy_", _copied_into),
        *_names_in_libraries(),
    ):
        yield


_read = torch.load
_write, _read_file = safetensors.save_file, safetensors.load_file
_open_file = safetensors.safe_open
_tag, _address = torch.serialization.location_tag, torch.UntypedStorage.data_ptr
_copy_into: Any = torch.UntypedStorage.copy_


NAMES = {"save_file", "load_file", "safe_save_file", "safe_load_file", "safe_open"}


def _names_in_libraries():
    """(module, name, replacement) of every name by which a library has a safetensors function."""
    replaced_by = (_write, _save_file), (_read_file, _load_file), (_open_file, _open)
    for module in list(sys.modules.values()):
        named = getattr(module, "__dict__", {})
        if not named.keys().isdisjoint(NAMES):
            for name in NAMES & named.keys():
                yield from ((module, name, to) for own, to in replaced_by if named[name] is own)


def _plain(tensor):
    """An ordinary tensor for a fake one, which takes no memory; its storage notes the card.

    Tied weights stay tied.
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
    """Which part of its storage a tensor is."""
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
    """What is staged for an asynchronous save has no data to copy."""
    return storage if source.device.type == "meta" else _copy_into(storage, source, *args, **kwargs)


def _location_of(storage):
    untyped = getattr(storage, "_untyped_storage", storage)
    return "cuda:0" if getattr(untyped, "_memlab_from_card", False) else _tag(storage)


def _load(f, map_location=None, *args, **kwargs):
    """torch.load, which would ask a card that is not there for memory."""
    for_card = []  # storages, kept so that no other takes the place of one

    def to_card(storage, *device, **settings):
        for_card.append(storage)
        return storage

    def place(storage, location):
        mapped = map_location
        if callable(mapped):
            mapped = mapped(storage, location)
        elif isinstance(mapped, dict):
            mapped = mapped.get(location)
        if isinstance(mapped, torch.UntypedStorage):  # of a function, such as `storage.cuda()`
            return storage
        if str(mapped or location).startswith("cuda"):
            to_card(storage)
        return storage

    with with_data(), replaced((torch.UntypedStorage, "cuda", to_card)):
        loaded = _read(f, place, *args, **kwargs)
    card = {storage._cdata for storage in for_card}
    there: dict[tuple, torch.Tensor] = {}  # what has come

    def move(tensor):
        storage = tensor.untyped_storage()._cdata
        if storage not in card:
            return tensor
        which = (storage, *_which(tensor))
        if which not in there:  # tied weights come once
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
    """safetensors' safe_open, which would write to a card's memory by itself."""
    try:
        opened: Any = _open_file(filename, framework, **settings)
    except RuntimeError as error:
        if framework != "pt" or "unable to mmap" not in str(error):
            raise
        opened = _Large(filename)
    return _ToCard(opened) if framework == "pt" and is_cuda_device(device) else opened


class _Large:
    """safetensors' safe_open of a file that is larger than the host's memory.

    safetensors maps a file as memory that can be written, of which the host has to have as much;
    here it is only read, page by page.
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
        return None  # tensors keep the file

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
            warnings.simplefilter("ignore")  # that it cannot be written
            if begin == end:
                return torch.empty(shape, dtype=dtype)
            where = {"count": (end - begin) // dtype.itemsize, "offset": self._begin + begin}
            return torch.frombuffer(self._bytes, dtype=dtype, **where).view(shape)


class _LargeSlice:
    """Of one of its weights."""

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
    """A file of weights, or one of its weights, put on the card as they are asked for."""

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
    """safetensors' save_file, of tensors of which some have no data.

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
    text += b" " * (-len(text) % 8)
    with open(filename, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            data = values_of(tensor)
            if data is None:
                file.seek(tensor.nbytes, 1)
                continue
            with with_data():
                file.write(data.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        file.truncate(8 + len(text) + end)


_KINDS = {dtype: name for name, dtype in safetensors._TYPES.items()}
