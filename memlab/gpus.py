"""The catalogue of GPUs: memory, compute rates and CUDA limits of each, and the search by name.

Three figures decide what fits:

- `total_memory` is what `torch.cuda.get_device_properties` reports and what an out-of-memory
  message calls "total capacity". It is less than the label on the box, because the driver and error
  correction keep some.
- `context` is what the process holds outside PyTorch's allocator: the CUDA context, loaded kernels,
  library handles.
- `workspace` is cuBLAS's workspace. PyTorch allocates it from its own allocator, once for each
  thread that multiplies matrices.

Where the figures come from, and how exact they are: totals differ by a few MiB, and up to 1 %,
between drivers and clouds. Each total here is that of a recent driver, and data/gpus.json names its
source.

Contexts other than the T4's are derived from an out-of-memory message of PyTorch 2: "this process
has A memory in use. Of the allocated memory B is allocated, and C is reserved but unallocated"
gives A - B - C. The message rounds to 0.01 GiB, so such a context is right to about 15 MiB for that
process. Another program loads other kernels, so two messages of the same kind of GPU differ by up
to 100 MiB. If no message of a GPU was found, its context is that of a relative with about as many
multiprocessors, and its sources say "assumed". Before PyTorch 1.13 with CUDA 11.7 all kernels were
loaded at the start, and a context took 0.7 to 1.3 GiB (pytorch/pytorch#86509, #107667).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.names import (
    LARGEST,
    ON_THE_MOVE,
    in_machine,
    like,
    maker_without_cuda,
    several,
    size_of,
    words_of,
)
from memlab.units import MiB

# Compute capability -> fp32 multiply-adds per multiprocessor and clock, if not 128: CUDA
# Programming Guide, "Throughput of Native Arithmetic Instructions".
MULTIPLY_ADDS = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
# Compute capability -> resident threads per multiprocessor. All others, from Pascal's 6.0 to
# Blackwell's 10.0, have 2,048.
THREADS_OF_PROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
Reached = tuple[float, float, float]  # operations per second: least, expected, most


@dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    total_memory: bytes that CUDA reports; None for a GPU without a limit.
    context: bytes of the CUDA context; None if unknown.
    capability: compute capability (major, minor).
    processors: the number of streaming multiprocessors, by NVIDIA's data sheets; some libraries
        choose kernels by it.
    sources: where total_memory and context come from.
    rates: number format -> operations per second of a dense matrix product, without sparsity, by
        NVIDIA. They are those of tensor cores that accumulate in fp32, or of ordinary cores on a
        GPU without tensor cores. Empty if no GPU is named.
    bandwidth: bytes per second of the memory, by NVIDIA; None if no GPU is named.
    label: GB printed on the box.
    also: further words that may occur in the GPU's name, such as those that a driver adds.
    cache: bytes of the L2 cache, by NVIDIA's data sheets and whitepapers; 0 if unknown.
    measured: number format -> operations per second (least, expected, most) that large matrix
        products of PyTorch were found to reach, for formats with such measurements. All three are
        equal for a GPU that keeps its clock. data/gpus.json names the sources, as for rates.
    share_of_bandwidth: the share of the bandwidth that memory-bound kernels reach; None if not
        measured. It is the mean of element-wise kernels, layer norm and softmax, each the median
        over tensors above 200 MB in NeuSight's measurements (Lee et al. 2025, sitar-lab/NeuSight
        at 6945927).
    pace: seconds of a measured step on this GPU over their estimate (`memlab.anchored`). All
        estimated seconds are multiplied by it; None without such a measurement.
    """

    name: str
    total_memory: int | None
    context: int | None
    capability: tuple[int, int]
    processors: int
    sources: str
    rates: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)
    bandwidth: float | None = None
    label: int | None = None
    also: tuple[str, ...] = ()
    cache: int = 0
    measured: dict[str, Reached] = dataclasses.field(default_factory=dict, compare=False)
    share_of_bandwidth: float | None = None
    pace: float | None = None

    def rate(self, dtype: str) -> float | None:
        """Operations per second in a number format; None if the GPU does not compute in it.

        A GPU without tensor cores for tf32 computes such products in fp32.
        """
        dtype = "float32" if dtype == "tf32" and dtype not in self.rates else dtype
        return self.rates.get(dtype)

    def reached(self, dtype: str) -> Reached | None:
        """Operations per second that large matrix products reach: (least, expected, most).

        Measured figures come first. Without them, the rate of the data sheet is multiplied by the
        share that the GPU's own tensor cores reach in half precision. Failing that, similar GPUs
        give the shares (`shares_like`): their least, median and most. None if the GPU does not
        compute in the format.
        """
        if dtype in self.measured:
            return self.measured[dtype]
        if dtype == "tf32" and dtype not in self.rates:
            return self.reached("float32")
        if dtype not in self.rates:
            return None
        # Tensor cores reach about the same share in every format; fp32 runs on other cores.
        own = [self.measured[half][1] / self.rates[half] for half in HALVES & self.measured.keys()]
        shares = (dtype != "float32" and sorted(own)) or shares_like(self, dtype)
        rate = self.rates[dtype]
        return rate * shares[0], rate * statistics.median(shares), rate * shares[-1]

    @property
    def traffic(self) -> float:
        """Bytes per second that memory-bound kernels reach.

        A GPU without a measured share takes the median share of the measured GPUs.
        """
        assert self.bandwidth is not None  # callers ask only for a GPU with rates
        shares = [card.share_of_bandwidth for card in GPUS.values() if card.share_of_bandwidth]
        return self.bandwidth * (self.share_of_bandwidth or statistics.median(shares))

    @property
    def clock(self) -> float:
        """Clock rate of the multiprocessors in Hz, by the data sheet's fp32 rate."""
        return self.rates["float32"] / (  # a multiply-add counts as two operations
            2 * self.processors * MULTIPLY_ADDS.get(self.capability, 128)
        )

    @property
    def has_whole_tensor_cores(self) -> bool:
        """Whether tensor cores accumulate in fp32 at full rate; GeForce cards do at half rate.

        At full rate, half precision is at least three times as fast as fp32 on ordinary cores.
        """
        half = self.rates.get("float16", 0)
        return half > 3 * self.rates.get("float32", half)

    @property
    def usable(self) -> int | None:
        """Bytes left to PyTorch's allocator: the total minus the context."""
        return None if self.total_memory is None else self.total_memory - (self.context or 0)

    @property
    def workspace(self) -> int:
        """Bytes of one cuBLAS workspace: 2 x 4 MiB + 8 x 16 KiB, or 32 MiB from Hopper on.

        This is PyTorch's default if CUBLAS_WORKSPACE_CONFIG is not set: `parseChosenWorkspaceSize`
        in aten/src/ATen/cuda/CublasHandlePool.cpp (":4096:2:16:8 default, 32MiB for Hopper and
        Blackwell").
        """
        return 32 * MiB if self.capability[0] >= 9 else (2 * 4096 + 8 * 16) * 1024

    @property
    def threads(self) -> int:
        """Threads that the whole GPU can hold at once.

        CUDA Programming Guide, "Compute Capabilities": maximum number of resident threads per
        multiprocessor.
        """
        return self.processors * THREADS_OF_PROCESSOR.get(self.capability, 2048)

    @property
    def symbols(self) -> dict[str, int]:
        """The GPU's values for the terms of a trace (`memlab.trace.trace.PhaseTrace.term`)."""
        return {"W": self.workspace, "T": self.threads}

    @property
    def in_words(self) -> str:
        """The name; for a GPU given as a number of bytes, also what is assumed about it."""
        if self.name in GPUS or self.total_memory is None:
            return self.name
        context = "" if self.context else ", without a CUDA context"
        capability = ".".join(map(str, self.capability))
        return f"{self.name} (taken for compute capability {capability}{context})"

    def without_limit(self) -> GPU:
        """The same GPU with unlimited memory."""
        return dataclasses.replace(self, total_memory=None)

    @property
    def native_dtypes(self) -> tuple[str, ...]:
        """Number formats of training that the GPU multiplies at full speed, by PyTorch's names.

        bf16 is native from compute capability 8.0 on (CUDA Programming Guide, appendix "Compute
        Capabilities"). Older GPUs emulate it.
        """
        return "float32", "float16", *["bfloat16"] * (self.capability >= (8, 0))


def _reached(tera: float | list[float]) -> Reached:
    """(least, expected, most) operations per second from one number of 10^12, or from three."""
    least, expected, most = tera if isinstance(tera, list) else [tera] * 3
    return least * 1e12, expected * 1e12, most * 1e12


def _read(name: str, values: dict[str, Any]) -> GPU:
    total, context = int(values["total_mib"] * MiB), int(values["context_mib"] * MiB)
    rates = {dtype: tera * 1e12 for dtype, tera in values["tera_ops"].items()}
    return GPU(
        name,
        total,
        context,
        tuple(values["capability"]),
        values["processors"],
        values["sources"],
        rates,
        values["gb_per_second"] * 1e9,
        values["gb"],
        tuple(values.get("also", ())),
        int(values["l2_mib"] * MiB),
        {dtype: _reached(tera) for dtype, tera in values.get("measured_tera_ops", {}).items()},
        values.get("share_of_bandwidth"),
    )


_FILE = Path(__file__).parent / "data" / "gpus.json"
GPUS: dict[str, GPU] = {
    name: _read(name, values)
    for name, values in json.loads(_FILE.read_text(encoding="utf-8")).items()
}

HALVES = {"float16", "bfloat16"}
# A power limit of about 70 W throttles these as it does no other GPU, so they set no example.
HELD_BACK = ("T4", "L4")


def shares_like(card: GPU, dtype: str) -> list[float]:
    """The shares of the data sheet that products reach on GPUs like this one, in ascending order.

    Like this one are GPUs of its compute capability whose tensor cores are of the same kind.
    Failing those, GPUs of its generation (major version) count, and failing these all GPUs. If no
    such GPU was measured in the format, half precision counts.
    """

    def measured(alike: Callable[[GPU], bool]) -> list[float]:
        cards = [gpu for gpu in GPUS.values() if gpu.name not in HELD_BACK and alike(gpu)]
        formats = [dtype] if any(dtype in gpu.measured for gpu in cards) else ["float16"]
        return sorted(
            gpu.measured[name][1] / gpu.rates[name]
            for gpu in cards
            for name in formats
            if name in gpu.measured and name in gpu.rates
        )

    kind = card.has_whole_tensor_cores
    return (  # `or`: an empty list means that no such GPU was measured
        measured(
            lambda gpu: gpu.capability == card.capability and gpu.has_whole_tensor_cores == kind
        )
        or measured(lambda gpu: gpu.capability[0] == card.capability[0])
        or measured(lambda gpu: True)
    )


def require_native(precision: str, device: str, has_bf16: bool) -> None:
    """Raise ValueError if a device only emulates a recipe's precision."""
    if "bf16" in precision and not has_bf16:
        raise ValueError(
            f"precision is {precision!r}: {device} has no native bfloat16 and allows fp32, fp16, "
            "fp16-amp"
        )


# If no GPU is named: no memory limit, and otherwise the rules of an A100.
ANY_CARD = GPU("a card without a limit", None, None, (8, 0), 108, "no card was named")


def _may_be(words: set[str]) -> list[GPU]:
    """The GPUs to which all these words apply: words of the name, the size, and `also`."""
    return [
        card
        for card in GPUS.values()
        if words and words <= words_of(card.name) | {f"{card.label}gb", *card.also}
    ]


def _meant(words: set[str]) -> GPU | None:
    """The GPU to which the words apply and whose name has no further words, or None.

    "a100 40gb" is A100-40GB; "a100" alone is neither A100, because both names have a size.
    """
    return next((card for card in _may_be(words) if words_of(card.name) <= words), None)


def find_gpu(card: str | int | float | GPU | None) -> GPU:
    """Find a GPU by its name ("T4", "4090", "A100-80", "rtx 3060 12gb") or by its memory.

    A name is one of `GPUS`, or as people and drivers write it. Case, punctuation and makers' words
    do not count, and the size may be left out as long as only one GPU is meant. "H100" is the SXM
    card, and "V100" the one with 16 GB.

    None is `ANY_CARD`, a GPU without a limit; a `GPU` is returned as it is. A number of bytes, or a
    text such as "11.5 GiB", is the memory for PyTorch's allocator, so the context is 0. The other
    rules are those of `ANY_CARD`, and there are no estimated seconds. A number below 1,000 is in
    GiB. A size as on a box, such as "24GB", is the least that a GPU of that size leaves to PyTorch.
    If no GPU has that size, it is that many billions of bytes. The name of the result says which.

    To estimate seconds for a GPU of your own, give it a bandwidth and rates. Rates are operations
    per second of each format that is multiplied; some products are in fp32 in every precision:

        dataclasses.replace(
            find_gpu("22 GiB"), capability=(8, 9), processors=60,
            bandwidth=500e9, rates={"float32": 40e12, "bfloat16": 80e12},
        )

    Raises ValueError in one line for a name that means no GPU, more than one, several of them
    ("2x4090"), or one without CUDA. The same goes for a size below 1 byte or above 1 PiB.
    """
    if card is None or isinstance(card, GPU):
        return card or ANY_CARD
    # Names come before sizes: "4090" and 4090 are a GPU, not a number of bytes.
    if isinstance(card, (str, int)) and (meant := _meant(words_of(str(card)))):
        return meant
    size = size_of(card)
    given, as_read = _bytes_of(*size) if size else (0, "")
    if not 1 <= given <= LARGEST:
        raise ValueError(f"gpu is {card!r}{_hint(card)}")
    # The name says how the size was read, since it appears in every answer.
    name = f"{given / MiB:,.0f} MiB" if given >= MiB else f"{given} bytes"
    if size and size[1] == "gib" and not str(card).lower().endswith("gib"):
        as_read = f" ({card} taken as GiB)"
    return dataclasses.replace(
        ANY_CARD,
        name=f"{name}{as_read}",
        total_memory=int(given),
        context=0,
        sources="given by the caller",
    )


def _bytes_of(number: float, unit: str) -> tuple[float, str]:
    """(bytes for PyTorch's allocator, how a size as on a box was read) of a size."""
    if unit != "gb":
        return number * (2**30 if unit == "gib" else 1), ""
    alike = [card for card in GPUS.values() if card.label == number]
    if not alike:
        return number * 1e9, f" ({number:g} GB of 10^9 bytes; no card that memlab knows has it)"
    least = min(alike, key=lambda card: card.usable or 0)
    return least.usable or 0, f" (of {number:g} GB; usable on {least.name}, the smallest of these)"


def _hint(card: object) -> str:
    """Why a name means no GPU, and which may be meant, as the end of an error message."""
    allowed = f": allowed are {', '.join(GPUS)}, a number of bytes from 1,000 to 2^50, or of GiB "
    allowed += 'such as "11.5 GiB"'
    if not isinstance(card, str):
        return allowed
    words = words_of(card)
    # From the most telling to the vaguest: another maker, several GPUs, a rented machine, a mobile
    # chip, an ambiguous name, and last a slip of the pen.
    if maker := maker_without_cuda(words):
        return (
            f", which is {maker}'s: memlab knows NVIDIA's cards only, because it simulates the "
            "allocator, the libraries and the kernels of CUDA"
        )
    many = several(card)
    if many and (names := _names(words_of(many[1]))):
        return f", {many[0]} cards: name one, {names}, and the number as ranks (--ranks {many[0]})"
    if machine := in_machine(card):
        return f", a machine with {machine}: name the card, and the number of cards as ranks"
    if kind := next((kind for word, kind in ON_THE_MOVE.items() if word in words), ""):
        return (
            f", a {kind} chip, whose memory is not that of the card with this number: give the GiB "
            'that PyTorch may use, as in "7.5 GiB"'
        )
    if names := _names(words):
        return f', which may be {names}: name one, or the GiB that PyTorch may use, as in "22 GiB"'
    alike = {"".join(sorted(words_of(name))): name for name in GPUS if like(words, name)}
    near = difflib.get_close_matches("".join(sorted(words)), alike, 1)
    return (f", the nearest is {alike[near[0]]}" if near else "") + allowed


def _names(words: set[str]) -> str:
    """The name of the GPU that the words mean, or the names of those that they may mean."""
    meant = _meant(words)
    return " or ".join(card.name for card in ([meant] if meant else _may_be(words)))


def gpu_of_device(device: str) -> GPU | None:
    """The GPU that a driver's name means: "Tesla V100-SXM2-16GB" is V100. None if unknown.

    The result is also None if drivers give two GPUs the same name: an RTX 4060 Ti has 8 or 16 GB. A
    size that no GPU of that name has is ignored ("H100 96GB HBM2e"), because a run reports its own
    total.
    """
    words = words_of(device)
    sizes = {word for word in words if re.fullmatch(r"\d+gb", word)}
    return _meant(words) or _meant(words - sizes)


def card_class(capability: tuple[int, int]) -> str:
    """The class of a GPU: all GPUs of a class take the same kernels, whatever the call.

    "small" refers to the shared memory of a multiprocessor, as on consumer cards.
    """
    if capability < (8, 0):
        return "{}.{}".format(*capability)
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return "small" if small else "8.0 and later"
