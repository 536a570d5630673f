"""Libraries that are imported when needed, and quietly; what they have said; the hub; errors.

PyTorch and transformers take seconds to import. What they say of a model of the catalogue (its
config, its shapes, the kernels of its attention) is therefore kept on disk (`remembered`), and a
question whose trace is kept, too, is answered without either.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import socket
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import platformdirs

FOLDER = "MEMLAB_CACHE"  # an environment's variable that names another folder for what is kept
# On whose releases it depends what a model is, and what its training does.
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
# Raise it by hand when a `remembered` function says something else than before.
FACTS_FORMAT = 3

# Modules that models of transformers share.
LAYERS = ("activation", "dropout", "linear", "normalization", "sparse")
SHARED = (
    *("transformers.integrations.sdpa_attention", "transformers.masking_utils"),
    *("transformers.activations", "transformers.pytorch_utils"),
    *(f"torch.nn.modules.{name}" for name in LAYERS),
)
THEIRS = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "safetensors"}
THEIRS = THEIRS - {"__main__"} | {"accelerate", "numpy", "typing_extensions"}

Function = TypeVar("Function", bound=Callable[..., Any])


def import_bitsandbytes(wanted_by: str) -> ModuleType:
    """The package bitsandbytes, or a ValueError that says what needs it."""
    return import_needed("bitsandbytes", wanted_by)


def import_needed(name: str, wanted_by: str) -> ModuleType:
    """A module of bitsandbytes, or of a package that brings it along if it is there.

    Four of its functions, for machines without a GPU, run as they are written: to have them
    compiled it would bring PyTorch's whole compiler, which takes a second. Raises ValueError, which
    says what needs the package, where that is not here.
    """
    # It warns at every step that 8-bit layers compute in fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    try:
        with mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
            return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(
            f"{wanted_by} needs the package {package}, which is not here: pip install it"
        ) from None


def hub_reachable() -> bool:
    """Whether the hub's name resolves here; asked first, because its client retries for 20 s."""
    if urllib.request.getproxies():
        return True  # the proxy resolves the name
    from huggingface_hub.constants import ENDPOINT

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


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind where it has no words."""
    return next(iter(str(error).splitlines()), type(error).__name__)


# ---------------------------------------------------------------------- what libraries have said


def cache_folder() -> Path:
    """Where memlab keeps what it found out: in the user's cache, or where `MEMLAB_CACHE` says."""
    return Path(os.environ.get(FOLDER) or platformdirs.user_cache_path("memlab"))


@functools.cache
def installed() -> dict[str, str]:
    """Library -> its release here, of `LIBRARIES`, as far as they are here.

    Builds for CUDA and for a CPU (2.13.0+cpu) are the same release.
    """
    releases = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            releases[name] = importlib.metadata.version(name).partition("+")[0]
    return releases


def write_whole(file: Path, content: bytes) -> None:
    """Write a file that others may read at the same time: whole, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Threads of all processes have numbers of their own.
    part = file.with_name(f".{file.name}.{threading.get_native_id()}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remembered(function: Function) -> Function:
    """What a function says of a model, kept in this process, and for the catalogue's on disk.

    The function's first argument is a model, further ones are plain values; what it returns is
    plain JSON (tuples become lists), the same for the same arguments and releases of `LIBRARIES`.
    Errors are not kept. A caller must not change what it is given.
    """
    answers: dict[str, Any] = {}

    @functools.wraps(function)
    def remembering(model: Any, *more: Any) -> Any:
        from memlab import models  # which keeps facts of its own

        name, values = models.identity(model)
        asked = json.dumps([function.__qualname__, name or values, *more], sort_keys=True)
        if asked in answers:
            return answers[asked]
        file = _file_of(f"{function.__module__} {asked} {values}") if name else None
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                answers[asked] = json.loads(file.read_bytes())
                return answers[asked]
        answers[asked] = json.loads(json.dumps(function(model, *more)))
        # What somebody has changed in this process is not so in the next one.
        if file is not None and not has_changed_code(json.loads(values)["model_type"]):
            with contextlib.suppress(OSError):
                write_whole(file, json.dumps(answers[asked]).encode())
        return answers[asked]

    return remembering  # type: ignore[return-value]


def has_changed_code(family: str) -> bool:
    """Whether somebody has changed the code of a family of models, as a library of kernels does.

    What is kept of a model knows nothing of that, so such a model is run as it is.
    """
    return changed(_modules_of(family))


def _modules_of(family: str) -> list[str]:
    """The modules of a family of transformers that are imported."""
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    folder = auto and f"transformers.models.{auto.model_type_to_module_name(family)}."
    return [name for name in sys.modules if folder and name.startswith(folder)]


def changed(modules: Iterable[str]) -> bool:
    """Whether functions or methods in these modules come from outside of their libraries.

    modules: names of Python modules with models' classes; what they share is looked at, too. What
    is not imported yet nobody has changed.
    """
    for module in [sys.modules[name] for name in (*SHARED, *modules) if name in sys.modules]:
        for value in vars(module).values():
            functions = [value, *(vars(value).values() if inspect.isclass(value) else ())]
            if any(
                inspect.isfunction(function) and _is_foreign(function) for function in functions
            ):
                return True
    return False


def _is_foreign(function: Callable[..., Any]) -> bool:
    return (function.__module__ or "").partition(".")[0] not in THEIRS


def _file_of(asked: str) -> Path:
    """The file of a fact; its name says the releases, too."""
    text = f"{asked} {json.dumps(installed())}, format {FACTS_FORMAT}"
    return cache_folder() / "facts" / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"
