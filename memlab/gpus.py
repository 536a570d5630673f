"""The cards the book speaks of, and what a training finds on each.

Three figures decide what fits. `total_memory` is what `torch.cuda.get_device_properties` reports
and what an out-of-memory message calls "total capacity": less than the label on the box, because
the driver and error correction keep some. `context` is what the process holds outside PyTorch's
allocator: the CUDA context, loaded kernels, library handles. `workspace` is cuBLAS's, which PyTorch
allocates once for each thread that multiplies matrices, out of its own allocator.

Totals differ by a few MiB, and up to 1 %, between drivers and clouds; each one here is of a recent
driver, and its thread is named. Contexts other than the T4's are derived from an out-of-memory
message of PyTorch 2: "this process has A memory in use. Of the allocated memory B is allocated,
and C is reserved but unallocated" gives A - B - C. The message rounds to 0.01 GiB, so such a figure
is right to about 15 MiB for that process; another program loads other kernels, so two messages of
the same kind of card differ by up to 100 MiB. Where no message of a card was found, its context is
that of a relative with about as many multiprocessors, and its sources say "assumed". Before PyTorch
1.13 with CUDA 11.7 all kernels were loaded at the start, and a context took 0.7 to 1.3 GiB
(pytorch/pytorch#86509, #107667).
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

# fp32 multiply-adds of a multiprocessor in a clock, 128 but for these: CUDA Programming Guide,
# "Throughput of Native Arithmetic Instructions".
MULTIPLY_ADDS = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
# Of the others, from Pascal's 6.0 to Blackwell's 10.0, 2,048.
THREADS_OF_PROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
Reached = tuple[float, float, float]  # operations a second: least, expected, most


@dataclass(frozen=True)
class GPU:
    """One kind of card. total_memory, context and workspace are bytes; capability (major, minor).

    total_memory is None for a card without a limit, context where it is not known.

    processors is the number of streaming multiprocessors, as NVIDIA's data sheets give it; some
    libraries choose kernels by it. sources says where total_memory and context come from.

    rates: number format -> operations per second of a dense matrix product, without sparsity: of
    tensor cores that add in fp32 where the card has them, else of ordinary cores. bandwidth: bytes
    per second of its memory. Both are NVIDIA's; empty and None where no card is named.
    cache: bytes of its L2 cache, by NVIDIA's data sheets and whitepapers, 0 where it is not known.

    measured: number format -> operations per second that large products of PyTorch's were found to
    reach, (least, expected, most), of the formats of which such figures were found; all three are
    one where a card keeps its clock. Sources of both stand with them in data/gpus.json.
    share_of_bandwidth: what kernels that compute little reach of the bandwidth, the mean of
    element-wise ones, layer norm and softmax, each the median of tensors above 200 MB in NeuSight's
    measurements (Lee et al. 2025, sitar-lab/NeuSight at 6945927); None where it measured none.

    pace: what a measured step on this card took over its estimate (`memlab.anchored`), by which
    all its seconds are multiplied; None without one.

    label: GB as it stands on the box. also: further words that may stand in the card's name, such
    as those that a driver adds to it.
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
        """Operations per second in a format; None where the card does not compute in it.

        A card without tensor cores for tf32 computes such products in fp32.
        """
        dtype = "float32" if dtype == "tf32" and dtype not in self.rates else dtype
        return self.rates.get(dtype)

    def reached(self, dtype: str) -> Reached | None:
        """Operations per second that large products reach in a format: (least, expected, most).

        What was measured, where there are such figures; else the share of the data
        sheet that the card's own tensor cores reach in half precision, or that cards like it do:
        the least, the median and the most of these. None where it does not compute in the format.
        """
        if dtype in self.measured:
            return self.measured[dtype]
        if dtype == "tf32" and dtype not in self.rates:
            return self.reached("float32")
        if dtype not in self.rates:
            return None
        own = [self.measured[half][1] / self.rates[half] for half in HALVES & self.measured.keys()]
        shares = (dtype != "float32" and sorted(own)) or shares_like(self, dtype)
        rate = self.rates[dtype]
        return rate * shares[0], rate * statistics.median(shares), rate * shares[-1]

    @property
    def traffic(self) -> float:
        """Bytes per second that kernels which compute little reach; by the median of others' shares
        where none was measured."""
        assert self.bandwidth is not None  # of a card with rates, which alone has seconds
        shares = [card.share_of_bandwidth for card in GPUS.values() if card.share_of_bandwidth]
        return self.bandwidth * (self.share_of_bandwidth or statistics.median(shares))

    @property
    def clock(self) -> float:
        """Clocks a second of its processors, those of the data sheet's rate of fp32."""
        return self.rates["float32"] / (
            2 * self.processors * MULTIPLY_ADDS.get(self.capability, 128)
        )

    @property
    def has_whole_tensor_cores(self) -> bool:
        """Whether tensor cores that add in fp32 run at full rate, which on GeForce cards is half.

        At full rate half precision is at least three times as quick as fp32 on ordinary cores.
        """
        half = self.rates.get("float16", 0)
        return half > 3 * self.rates.get("float32", half)

    @property
    def usable(self) -> int | None:
        """Bytes left to PyTorch's allocator: the total less the context."""
        return None if self.total_memory is None else self.total_memory - (self.context or 0)

    @property
    def workspace(self) -> int:
        """Bytes of one cuBLAS workspace: 2 x 4 MiB + 8 x 16 KiB, or 32 MiB from Hopper on.

        PyTorch's `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp
        (":4096:2:16:8 default, 32MiB for Hopper and Blackwell"), when CUBLAS_WORKSPACE_CONFIG is
        not set.
        """
        return 32 * MiB if self.capability[0] >= 9 else (2 * 4096 + 8 * 16) * 1024

    @property
    def threads(self) -> int:
        """Threads that its processors hold at once: CUDA Programming Guide, "Compute Capabilities",
        maximum number of resident threads per multiprocessor."""
        return self.processors * THREADS_OF_PROCESSOR.get(self.capability, 2048)

    @property
    def symbols(self) -> dict[str, int]:
        """What the terms of a trace take from a card (`memlab.trace.trace.Half.term`)."""
        return {"W": self.workspace, "T": self.threads}

    @property
    def in_words(self) -> str:
        """Its name; of a number of bytes also what else is assumed of it."""
        if self.name in GPUS or self.total_memory is None:
            return self.name
        context = "" if self.context else ", without a CUDA context"
        capability = ".".join(map(str, self.capability))
        return f"{self.name} (taken for compute capability {capability}{context})"

    def without_limit(self) -> GPU:
        """The same card with as much memory as it is asked for."""
        return dataclasses.replace(self, total_memory=None)

    @property
    def native_dtypes(self) -> tuple[str, ...]:
        """Formats of training that the card multiplies at full speed, by PyTorch's names.

        CUDA Programming Guide, appendix "Compute Capabilities": bf16 from 8.0. It also runs on
        older cards, emulated.
        """
        return "float32", "float16", *["bfloat16"] * (self.capability >= (8, 0))


def _reached(tera: float | list[float]) -> Reached:
    """(least, expected, most) of a number of 10^12 operations per second, or of three."""
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
# Their limit of 70 W holds them back as no other card's does, so others are not assumed like them.
HELD_BACK = ("T4", "L4")


def shares_like(card: GPU, dtype: str) -> list[float]:
    """The shares of the data sheet that products were found to reach on cards like this one.

    In order. Of cards of its compute capability with tensor cores of its kind, else of its
    generation, else of all; where no card was measured in the format, in half precision.
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
    return (
        measured(
            lambda gpu: gpu.capability == card.capability and gpu.has_whole_tensor_cores == kind
        )
        or measured(lambda gpu: gpu.capability[0] == card.capability[0])
        or measured(lambda gpu: True)
    )


def require_native(precision: str, device: str, has_bf16: bool) -> None:
    """Raise ValueError if a device computes a recipe's precision by emulation only."""
    if "bf16" in precision and not has_bf16:
        raise ValueError(
            f"precision is {precision!r}: {device} has no native bfloat16 and allows fp32, fp16, "
            "fp16-amp"
        )


# Where no card is named: no limit, and the other rules of an A100.
ANY_CARD = GPU("a card without a limit", None, None, (8, 0), 108, "no card was named")


def _may_be(words: set[str]) -> list[GPU]:
    """The cards whose names can have all these words: those of the name, its size, and `also`."""
    return [
        card
        for card in GPUS.values()
        if words and words <= words_of(card.name) | {f"{card.label}gb", *card.also}
    ]


def _meant(words: set[str]) -> GPU | None:
    """The card that may have these words and whose name has no others; None if there is none."""
    return next((card for card in _may_be(words) if words_of(card.name) <= words), None)


def find_gpu(card: str | int | float | GPU | None) -> GPU:
    """The card of a name ("T4", "4090", "A100-80", "rtx 3060 12gb"), of so many bytes, or as it is.

    A name is one of `GPUS`, or as people and drivers write it: without regard to case, signs and
    makers' words, and with its size or not, as long as one card is meant. "H100" is the SXM card,
    and "V100" the one of 16 GB.

    None is `ANY_CARD`. A number of bytes, or a text such as "11.5 GiB", is what PyTorch's allocator
    may take, so its context is 0; the other rules are those of `ANY_CARD`, and it has no seconds.
    A number below 1,000 is one of GiB. A size as on a box, such as "24GB", is the least that a card
    of that size leaves to PyTorch, or so many billions of bytes where no card has it; the card's
    name says which. Where seconds are wanted for a card of one's own, give it rates, operations per
    second of each format that is multiplied (some products are in fp32 in every precision), and a
    bandwidth:

        dataclasses.replace(
            find_gpu("22 GiB"), capability=(8, 9), processors=60,
            bandwidth=500e9, rates={"float32": 40e12, "bfloat16": 80e12},
        )

    Raises ValueError in one line for a name that means no card or several, for several cards, for
    a card that does not run CUDA, and for a size below 1 byte or above 1 PiB.
    """
    if card is None or isinstance(card, GPU):
        return card or ANY_CARD
    if isinstance(card, (str, int)) and (meant := _meant(words_of(str(card)))):
        return meant
    size = size_of(card)
    given, as_read = _bytes_of(*size) if size else (0, "")
    if not 1 <= given <= LARGEST:
        raise ValueError(f"gpu is {card!r}{_hint(card)}")
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
    """The bytes of a size for PyTorch, and how a size as on a box was read."""
    if unit != "gb":
        return number * (2**30 if unit == "gib" else 1), ""
    alike = [card for card in GPUS.values() if card.label == number]
    if not alike:
        return number * 1e9, f" ({number:g} GB of 10^9 bytes; no card that memlab knows has it)"
    least = min(alike, key=lambda card: card.usable or 0)
    return least.usable or 0, f" (of {number:g} GB; what {least.name}, the least of these, leaves)"


def _hint(card: object) -> str:
    """Why a name is no card's, and what may be meant, for the words of an error."""
    allowed = f": allowed are {', '.join(GPUS)}, a number of bytes from 1,000 to 2^50, or of GiB "
    allowed += 'such as "11.5 GiB"'
    if not isinstance(card, str):
        return allowed
    words = words_of(card)
    if maker := maker_without_cuda(words):
        return (
            f", which is {maker}'s: memlab knows NVIDIA's cards only, because it follows the "
            "allocator, the libraries and the kernels of CUDA"
        )
    many = several(card)
    if many and (names := _names(words_of(many[1]))):
        return f", {many[0]} cards: name one, {names}, and how many as ranks (--ranks {many[0]})"
    if machine := in_machine(card):
        return f", a machine with {machine}: name the card, and several as ranks"
    if kind := next((kind for word, kind in ON_THE_MOVE.items() if word in words), ""):
        return (
            f", a {kind}'s, whose memory is not that of the card with the number: name the GiB "
            'that PyTorch may take, as in "7.5 GiB"'
        )
    if names := _names(words):
        return f', which may be {names}: name one, or the GiB that PyTorch may take, as in "22 GiB"'
    alike = {"".join(sorted(words_of(name))): name for name in GPUS if like(words, name)}
    near = difflib.get_close_matches("".join(sorted(words)), alike, 1)
    return (f", the nearest is {alike[near[0]]}" if near else "") + allowed


def _names(words: set[str]) -> str:
    """The card that words mean, or those that they may."""
    meant = _meant(words)
    return " or ".join(card.name for card in ([meant] if meant else _may_be(words)))


def gpu_of_device(device: str) -> GPU | None:
    """The card that a driver's name means: "Tesla V100-SXM2-16GB" is V100. None if unknown.

    None, too, where a driver calls two cards the same: an RTX 4060 Ti has 8 or 16 GB. A size that
    no card of the name has is passed over ("H100 96GB HBM2e"); a run says its own total.
    """
    words = words_of(device)
    sizes = {word for word in words if re.fullmatch(r"\d+gb", word)}
    return _meant(words) or _meant(words - sizes)


def card_class(capability: tuple[int, int]) -> str:
    """The class of a card: those of one take the same routes, whatever the call.

    Small is the shared memory of a multiprocessor, as consumer cards have it.
    """
    if capability < (8, 0):
        return "{}.{}".format(*capability)
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return "small" if small else "8.0 and later"
