"""Optional imports, a cache of facts about models, the hub's reachability, errors as one line.

PyTorch and transformers take seconds to import. The facts that they give about a model of the
catalogue (its config, its shapes, the kernels of its attention) are therefore cached on disk
(`remembered`). If the trace of a recipe is cached as well, a question is answered without importing
either library. Facts are not cached if another library has patched the model's code
(`has_changed_code`).
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

FOLDER = "MEMLAB_CACHE"  # the environment variable that names another cache folder
# The libraries whose releases decide what a model is and what its training does.
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
# Increase it by hand when a `remembered` function returns something else than before.
FACTS_FORMAT = 3

# Modules that all models of transformers share. `changed` looks for patches in them too.
LAYERS = ("activation", "dropout", "linear", "normalization", "sparse")
SHARED = (
    *("transformers.integrations.sdpa_attention", "transformers.masking_utils"),
    *("transformers.activations", "transformers.pytorch_utils"),
    *(f"torch.nn.modules.{name}" for name in LAYERS),
)
# Packages that functions in a model's module may come from. A function from a user's script
# (`__main__`) is a patch.
THEIRS = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "safetensors"}
THEIRS |= {"accelerate", "numpy", "typing_extensions"}

Function = TypeVar("Function", bound=Callable[..., Any])


def import_bitsandbytes(wanted_by: str) -> ModuleType:
    """The package bitsandbytes. Raises ValueError, naming `wanted_by`, if it is not installed."""
    return import_needed("bitsandbytes", wanted_by)


def import_needed(name: str, wanted_by: str) -> ModuleType:
    """Import a module of bitsandbytes, or of a package that imports bitsandbytes if it can.

    Dynamo is switched off during the import. bitsandbytes decorates four of its CPU functions with
    `torch.compile` (`_try_torch_compile` in bitsandbytes/backends/default/ops.py). That would
    import PyTorch's whole compiler, which takes a second; without it the functions run eagerly.

    Raises ValueError, naming `wanted_by`, if the package is not installed.
    """
    # bitsandbytes warns at every step that 8-bit layers compute in fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    try:
        with mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
            return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(
            f"{wanted_by} needs the package {package}, which is not installed: pip install it"
        ) from None


def hub_reachable() -> bool:
    """Whether the hub's host name resolves; its own client would retry for 20 s first."""
    if urllib.request.getproxies():
        return True  # the proxy resolves the name
    from huggingface_hub.constants import ENDPOINT

    try:
        socket.getaddrinfo(urllib.parse.urlparse(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def one_line(error: BaseException, limit: int = 160) -> str:
    """The message of an error as one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def with_floats(values: Any) -> Any:
    """The values with real floats in place of transformers 5's {"__float__": "Infinity"}."""
    if isinstance(values, dict):
        if values.keys() == {"__float__"}:
            return float(values["__float__"])
        return {name: with_floats(value) for name, value in values.items()}
    return [with_floats(value) for value in values] if isinstance(values, list) else values


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


# ---------------------------------------------------------------------- facts, cached on disk


def cache_folder() -> Path:
    """The folder of memlab's caches: `MEMLAB_CACHE`, or a folder in the user's cache."""
    return Path(os.environ.get(FOLDER) or platformdirs.user_cache_path("memlab"))


@functools.cache
def installed() -> dict[str, str]:
    """Library -> installed release, for those of `LIBRARIES` that are installed.

    The local part of a version is dropped: builds for CUDA and for a CPU (2.13.0+cpu) count as the
    same release.
    """
    releases = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            releases[name] = importlib.metadata.version(name).partition("+")[0]
    return releases


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically: other processes see the whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # A native thread id is unique among all processes, so no two writers share a temporary file.
    part = file.with_name(f".{file.name}.{threading.get_native_id()}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remembered(function: Function) -> Function:
    """Cache a function of a model: in this process, and on disk for models of the catalogue.

    The function's first argument is a model; further arguments are plain values. It returns plain
    JSON (tuples become lists). The result must depend only on the arguments and the releases of
    `LIBRARIES`. Errors are not cached. Callers must not modify the result, which is shared.
    """
    answers: dict[str, Any] = {}

    @functools.wraps(function)
    def remembering(model: Any, *more: Any) -> Any:
        from memlab import models  # imported here, because it imports this module

        name, values = models.identity(model)
        asked = json.dumps([function.__qualname__, name or values, *more], sort_keys=True)
        if asked in answers:
            return answers[asked]
        # The published values are part of the key: an entry of the catalogue may be corrected.
        file = _file_of(f"{function.__module__} {asked} {values}") if name else None
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                answers[asked] = json.loads(file.read_bytes())
                return answers[asked]
        # Through JSON, so that the first answer has the same types as one from disk.
        answers[asked] = json.loads(json.dumps(function(model, *more)))
        # A patch of the model's code holds for this process only, so nothing goes to disk.
        if file is not None and not has_changed_code(json.loads(values)["model_type"]):
            with contextlib.suppress(OSError):
                write_whole(file, json.dumps(answers[asked]).encode())
        return answers[asked]

    return remembering  # type: ignore[return-value]


def has_changed_code(family: str) -> bool:
    """Whether the code of a model family is patched in this process, as kernel libraries do it.

    Cached facts and traces know nothing of a patch. Such a model must be run as it is.
    """
    return changed(_modules_of(family))


def _modules_of(family: str) -> list[str]:
    """The imported modules of a model family of transformers, such as `llama`."""
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    folder = auto and f"transformers.models.{auto.model_type_to_module_name(family)}."
    return [name for name in sys.modules if folder and name.startswith(folder)]


def changed(modules: Iterable[str]) -> bool:
    """Whether functions or methods in these modules come from a foreign package.

    modules: names of modules with classes of models. The modules that all models share (`SHARED`)
        are searched too. A module that is not imported yet cannot have been patched.
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
    """The file of a fact; its name is a hash of question, installed releases and format."""
    text = f"{asked} {json.dumps(installed())}, format {FACTS_FORMAT}"
    return cache_folder() / "facts" / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"
