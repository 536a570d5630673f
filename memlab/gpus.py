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
the same kind of card differ by up to 100 MiB. Before PyTorch 1.13 with CUDA 11.7 all kernels were
loaded at the start, and a context took 0.7 to 1.3 GiB (pytorch/pytorch#86509, #107667).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from memlab.units import MiB


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace: 8,519,680 (2 x 4 MiB + 8 x 16 KiB), or 32 MiB from Hopper on.

    PyTorch's `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp (":4096:2:16:8
    default, 32MiB for Hopper and Blackwell"), when CUBLAS_WORKSPACE_CONFIG is not set.
    """
    return 32 * MiB if capability[0] >= 9 else (2 * 4096 + 8 * 16) * 1024


def native_dtypes(capability: tuple[int, int]) -> tuple[str, ...]:
    """Number formats that a compute capability multiplies at full speed, by PyTorch's names.

    CUDA Programming Guide, appendix "Compute Capabilities", table of the input types of tensor
    cores by compute capability: bf16 and tf32 from 8.0; fp8 (E4M3, E5M2) from 8.9; fp4 (E2M1) from
    10.0; int8 from 7.5; int4 from 7.5 to 8.9. fp16 and fp32: table of arithmetic instructions,
    fp16 from 5.3. bf16 also runs on older cards, emulated.
    """
    names = ["float32", "float16"]
    names += ["bfloat16", "tf32"] if capability >= (8, 0) else []
    names += ["float8_e4m3fn", "float8_e5m2"] if capability >= (8, 9) else []
    names += ["float4_e2m1fn"] if capability >= (10, 0) else []
    names += ["int8"] if capability >= (7, 5) else []
    names += ["int4"] if (7, 5) <= capability <= (8, 9) else []
    return tuple(names)


@dataclass(frozen=True)
class GPU:
    """One kind of card. total_memory, context and workspace are bytes; capability (major, minor).

    total_memory is None for a card without a limit, context where it is not known.

    processors is the number of streaming multiprocessors, as NVIDIA's data sheets give it; some
    libraries choose kernels by it. sources says where total_memory and context come from.

    rates: number format -> operations a second of a dense matrix product, without sparsity: of
    tensor cores that add in fp32 where the card has them, else of ordinary cores. bandwidth: bytes
    a second of its memory. Both are NVIDIA's (rates_source); empty and None where no card is named.

    unlike: words of a name that tell other cards with the same chip's name from this one.
    """

    name: str
    total_memory: int | None
    context: int | None
    capability: tuple[int, int]
    processors: int
    sources: str
    rates: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)
    bandwidth: float | None = None
    rates_source: str = ""
    unlike: tuple[str, ...] = ()

    def rate(self, dtype: str) -> float | None:
        """Operations a second in a format; None where the card does not compute in it.

        A card without tensor cores for tf32 computes such products in fp32.
        """
        dtype = "float32" if dtype == "tf32" and dtype not in self.rates else dtype
        return self.rates.get(dtype)

    @property
    def usable(self) -> int | None:
        """Bytes left to PyTorch's allocator: the total less the context."""
        return None if self.total_memory is None else self.total_memory - (self.context or 0)

    @property
    def workspace(self) -> int:
        """Bytes of one cuBLAS workspace."""
        return cublas_workspace(self.capability)

    def without_limit(self) -> GPU:
        """The same card with as much memory as it is asked for."""
        return dataclasses.replace(self, total_memory=None)

    @property
    def native_dtypes(self) -> tuple[str, ...]:
        """Number formats that the card multiplies at full speed."""
        return native_dtypes(self.capability)


def _read(name: str, said: dict) -> GPU:
    total, context = int(said["total_mib"] * MiB), int(said["context_mib"] * MiB)
    rates = {dtype: tera * 1e12 for dtype, tera in said["tera_ops"].items()}
    return GPU(
        name,
        total,
        context,
        tuple(said["capability"]),
        said["processors"],
        said["sources"],
        rates,
        said["gb_per_second"] * 1e9,
        said["rates_source"],
        tuple(said.get("unlike", ())),
    )


_FILE = Path(__file__).parent / "data" / "gpus.json"
GPUS: dict[str, GPU] = {
    name: _read(name, said) for name, said in json.loads(_FILE.read_text(encoding="utf-8")).items()
}


def require_native(precision: str, device: str, has_bf16: bool) -> None:
    """Raise ValueError if a device computes a recipe's precision by emulation only."""
    if "bf16" in precision and not has_bf16:
        raise ValueError(
            f"precision is {precision!r}: {device} has no native bfloat16 and allows fp32, fp16, "
            "fp16-amp"
        )


# Where no card is named: no limit, and the other rules of an A100.
ANY_CARD = GPU("a card without a limit", None, None, (8, 0), 108, "no card was named")


# Words that tell no card from another, and the sizes that stand on boxes, in GB.
COMMON_WORDS = re.compile(r"nvidia|geforce|tesla|rtx|gb|pcie|sxm\d*|hbm\d*e?")
LABELS = (16, 24, 40, 48, 80, 141)
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?GiB", re.IGNORECASE)


def _words(name: str) -> list[str]:
    apart = re.findall(
        r"[a-z]*\d+(?=gb)|[a-z]*\d+[a-z]*|[a-z]+", name.lower().replace("rtx", "rtx ")
    )
    return [word for word in apart if not COMMON_WORDS.fullmatch(word)]


def _is_meant(card: GPU, name: str) -> bool:
    """Whether a name has the card's model and nothing that it is not, its size included."""
    if set(card.unlike) & set(re.findall("[a-z]+", name.lower())):
        return False
    words = _words(name)
    model, *more = _words(card.name)
    label = next(size for size in LABELS if size * 1024 >= card.total_memory / MiB)
    return model in words and set(words) <= {model, *more, str(label)}


def find_gpu(card: str | int | float | GPU | None) -> GPU:
    """The card of a name ("T4", "4090", "A100-80", "h100 80gb"), of so many bytes, or as it is.

    None is `ANY_CARD`. A number of bytes, or a text such as "11.5 GiB", is what PyTorch's allocator
    may take, so its context is 0; the other rules are those of `ANY_CARD`. Raises ValueError for
    an unknown name, for one that two cards have, and for less than 1 byte.
    """
    if card is None or isinstance(card, GPU):
        return card or ANY_CARD
    size = isinstance(card, str) and SIZE.fullmatch(card)
    card = int(float(size[1]) * 2**30) if size else card
    if isinstance(card, (int, float)) and not isinstance(card, bool) and 1 <= card < float("inf"):
        size = f"{card / MiB:,.0f} MiB" if card >= MiB else f"{card} bytes"
        given = {"total_memory": int(card), "context": 0, "sources": "given by the caller"}
        return dataclasses.replace(ANY_CARD, name=size, **given)
    hint = ""
    if isinstance(card, str):
        meant = [known for known in GPUS.values() if _is_meant(known, card)]
        if len(meant) == 1:
            return meant[0]
        hint = _hint(card)
    raise ValueError(
        f"gpu is {card!r}{hint}: allowed are {', '.join(GPUS)}, or a number of bytes above 0, or "
        'of GiB such as "11.5 GiB"'
    )


def _hint(name: str) -> str:
    """Which cards an unknown name may mean, for the words of an error."""
    words = _words(name)
    may_be = [known.name for known in GPUS.values() if words and words == _words(known.name)[:1]]
    if len(may_be) > 1:
        return f", which may be {' or '.join(may_be)}"
    alike = {"".join(_words(known)): known for known in GPUS}
    near = difflib.get_close_matches("".join(words), alike, 1)
    return f", the nearest is {alike[near[0]]}" if near else ""


def gpu_of_device(device: str) -> GPU | None:
    """The card that a driver's name means: "Tesla V100-SXM2-16GB" is V100. None if unknown.

    A card is meant where all words of its name are among the driver's; of two, the longer one.
    """
    words = set(device.lower().replace("-", " ").split())
    meant = [
        name
        for name, card in GPUS.items()
        if set(name.lower().split("-")) <= words and not words & set(card.unlike)
    ]
    return GPUS[max(meant, key=len)] if meant else None
