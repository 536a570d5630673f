"""Libraries that are imported when needed, and quietly; their JSON; the hub; errors in one line."""

import importlib
import logging
import os
import socket
import urllib.parse
import urllib.request
from types import ModuleType
from typing import Any
from unittest import mock

from huggingface_hub.constants import ENDPOINT


def import_bitsandbytes(wanted_by: str) -> ModuleType:
    """The package bitsandbytes, or a ValueError that says what needs it."""
    try:
        return import_quietly("bitsandbytes")
    except ImportError:
        raise ValueError(
            f"{wanted_by} needs the package bitsandbytes, which is not here: pip install it"
        ) from None


def import_torchao(wanted_by: str) -> ModuleType:
    """The package torchao.optim, or a ValueError that says what needs it."""
    try:
        return import_quietly("torchao.optim")
    except ImportError:
        raise ValueError(
            f"{wanted_by} needs the package torchao, which is not here: pip install it"
        ) from None


def import_quietly(name: str) -> ModuleType:
    """The package bitsandbytes, or one that brings it along if it is there.

    Four of its functions, for machines without a GPU, run as they are written: to have them
    compiled it would bring PyTorch's whole compiler, which takes a second.
    """
    # It warns at every step that 8-bit layers compute in fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    with mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
        return importlib.import_module(name)


def hub_reachable() -> bool:
    """Whether the hub's name resolves here; asked first, because its client retries for 20 s."""
    if urllib.request.getproxies():
        return True  # the proxy resolves the name
    try:
        socket.getaddrinfo(urllib.parse.urlparse(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def one_line(error: BaseException, limit: int = 160) -> str:
    """What an error says, in one line of so many characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def with_floats(values: Any) -> Any:
    """The values with floats for what transformers 5 writes for them: {"__float__": "Infinity"}."""
    if isinstance(values, dict):
        if values.keys() == {"__float__"}:
            return float(values["__float__"])
        return {name: with_floats(value) for name, value in values.items()}
    return [with_floats(value) for value in values] if isinstance(values, list) else values
