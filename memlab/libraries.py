"""Libraries that are imported when they are needed, and quietly."""

import importlib
import logging
import os
from unittest import mock


def import_bitsandbytes(wanted_by: str):
    """The package bitsandbytes, or a ValueError that says what needs it."""
    try:
        return import_quietly("bitsandbytes")
    except ImportError:
        raise ValueError(
            f"{wanted_by} needs the package bitsandbytes, which is not here: pip install it"
        ) from None


def import_quietly(name: str):
    """The package bitsandbytes, or one that brings it along if it is there.

    Four of its functions, for machines without a GPU, run as they are written: to have them
    compiled it would bring PyTorch's whole compiler, which takes a second.
    """
    # It warns of an optional kernel for 4-bit products on CPUs.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # And at every step that 8-bit layers compute in fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    with mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
        return importlib.import_module(name)
