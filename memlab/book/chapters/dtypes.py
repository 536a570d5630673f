"""Number formats compared: their limits, their cards, and what storing in them does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import pandas as pd
import psutil
import torch
from matplotlib.figure import Figure

from memlab import models
from memlab.book import show
from memlab.book.chapters.bits import FORMATS, Format
from memlab.book.chapters.patients import Patients
from memlab.book.lessons import in_turns
from memlab.gpus import find_gpu
from memlab.predict.measure import Meter
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import GiB, MiB

# Formats of a matrix product, and PyTorch's names of them.
PRODUCTS = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}
PRODUCTS |= {"fp8": "float8_e4m3fn", "fp4": "float4_e2m1fn", "int8": "int8"}
# The format that a model is built in, and the one that it is converted to then.
BUILT = {"fp32": (torch.float32, None), "fp16": (torch.float16, None)}
BUILT |= {"bf16": (torch.bfloat16, None), "fp32, then fp16": (torch.float32, torch.float16)}
STORED = ["bf16", "fp16", "fp8 E4M3", "int8", "fp4 E2M1", "fp4 E3M0", "int4"]
# Where a line's name stands: beside which power of two, and on which sides of it.
NAMED = {"fp32": (60, "left", "top"), "tf32": (60, "left", "top"), "bf16": (60, "left", "bottom")}
NAMED |= {"fp16": (0, "left", "bottom"), "fp8 E5M2": (12, "left", "bottom")}
NAMED |= {"fp8 E4M3": (5, "left", "top"), "fp4 E2M1": (0, "right", "center")}
NAMED |= {"fp4 E3M0": (2, "left", "bottom"), "int16": (14, "right", "top")}
NAMED |= {"int8": (6, "right", "top"), "int4": (2, "right", "top")}


def limits() -> pd.DataFrame:
    """Of each format its bits (sign-exponent-mantissa; an integer's sign-value) and its limits."""
    rows = {}
    for name, known in FORMATS.items():
        parts = (1, known.exponent, known.mantissa) if known.exponent else (1, known.mantissa)
        rows[name] = {
            "bits": "-".join(map(str, parts)),
            "bytes": f"{known.bytes:g}",
            "largest": f"{known.largest:.5g}",
            "smallest": f"{known.smallest:.3g}",
            "step at 1": f"{known.epsilon:.3g}",
        }
    return pd.DataFrame(rows).T


def range_figure(step: Callable[[torch.Tensor, Format], torch.Tensor]) -> Figure:
    """A line a format: the step relative to a number against its size, both as powers of two.

    step: the distance between the neighbours of some numbers in a format.
    """
    fig, axes = show.figure(6, 6, nrows=2)
    hues = dict(zip(FORMATS, 2 * list(show.COLOURS.values()), strict=False))
    for ax, names in zip(axes, (list(FORMATS)[:4], list(FORMATS)[3:]), strict=True):
        for name in names:
            known, (at, ha, va) = FORMATS[name], NAMED[name]
            first, last = math.log2(known.smallest), math.log2(known.largest)
            powers = torch.arange(math.ceil(first), math.floor(last) + 1)
            numbers = torch.exp2(powers.double())
            height = (step(numbers, known) / numbers).log2()
            ax.plot(powers, height, color=hues[name], lw=2)
            where = at, height[(powers - at).abs().argmin()]
            shift = -4 * (ha == "right"), {"top": -3, "center": 0, "bottom": 3}[va]
            beside = dict(xytext=shift, textcoords="offset points", ha=ha, va=va)
            ax.annotate(name, where, color=hues[name], **beside)
        ax.set(ylabel="step / number, 2^")
    axes[0].set(xlim=(-152, 132), ylim=(-26, 1))
    axes[1].set(xlim=(-25, 18), ylim=(-16, 1.5), xlabel="size of the number, as a power of two")
    return fig


def built_in_formats(name: str, device: torch.device) -> pd.DataFrame:
    """MiB of building a model in each format of `BUILT`: what stays, and its peak.

    The peak is predicted as parameters times bytes, with a second copy of the largest tensor where
    the model is converted, and measured on the device, where it has the room.
    """
    with torch.device("meta"):
        sizes = [p.numel() for p in models.build(name).parameters()]
    rows = {}
    for label, (dtype, then) in BUILT.items():
        stays = sum(sizes) * (then or dtype).itemsize
        predicted = sum(sizes) * dtype.itemsize + max(sizes) * (then.itemsize if then else 0)
        found = math.nan
        if predicted < room_on(device):
            with Meter(device) as meter, torch.device(device):
                model = models.build(name, dtype=dtype)
                if then is not None:
                    model = model.to(then)
            stays = sum(p.nbytes for p in model.parameters())
            found = meter.footprint.peak_allocated
            del model
        else:
            print(f"{label}: {name} is too large to be built here.")
        row = {"stays": stays / MiB, "predicted peak": predicted / MiB, "measured": found / MiB}
        rows[label] = row | {"error": show.error(predicted, found)}
    return pd.DataFrame(rows).T


def room_on(device: torch.device) -> float:
    """Bytes that a model may take on a device; on a CPU no more than it fills in a minute."""
    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    return min(0.9 * psutil.virtual_memory().available, 4 * GiB)


def harm_of_storing(
    stored: Callable[..., torch.Tensor], patients: Patients
) -> dict[tuple[str, str], list[float]]:
    """(format, scaled or bare) -> what storing the linear weights so adds to the loss, by seed.

    stored: a weight as a format holds it, of the weight, the format (`known`) and whether it has a
        scale (`scaled`).
    """
    harm = {}
    for name in STORED:
        for way, scaled in (("scaled", True), ("bare", False)):
            how = dict(known=FORMATS[name], scaled=scaled)
            harm[name, way] = patients.harm_of(partial(stored, **how))
    return harm


def peak_rates(cards: Iterable[str]) -> pd.DataFrame:
    """10**12 operations a second of a dense product, by card and format, by data sheets.

    NaN where a card does not multiply the format.
    """
    rates = {card: find_gpu(card).rates for card in cards}
    rows = {
        card: {label: known.get(name, math.nan) / 1e12 for label, name in PRODUCTS.items()}
        for card, known in rates.items()
    }
    return pd.DataFrame(rows).T


def tf32_speedup(recipe: Recipe, card: str) -> float:
    """How many times as fast a recipe in fp32 is estimated to be where products may take tf32."""
    rates, before = {}, torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            rates[allowed] = simulate(recipe, card).samples_per_second
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return rates[True] / rates[False]


def conversion_times(device: torch.device, count: int = 2_000_000) -> pd.Series:
    """Median times of converting bf16 to fp32 and back, over that of a copy in fp32."""
    whole = torch.randn(count, device=device)
    half = whole.bfloat16()
    work = {"copy": whole.clone, "to fp32": half.float, "from fp32": whole.bfloat16}
    took = in_turns(work, rounds=16)[1:].median()
    return took / took["copy"]
