"""Which kernel an attention call gets, and what it takes on a simulated card and here."""

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.nn.attention import SDPBackend, sdpa_kernel

from memlab import gpus
from memlab.book import show
from memlab.card.device import SimulatedGPU
from memlab.card.kernels.rules import RULES
from memlab.card.kernels.sdpa import sdpa_route
from memlab.footprint import Footprint
from memlab.predict.measure import Meter, device_name
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB

CARDS = {"T4": (7, 5), "A100, 4090": (8, 0), "H100": (9, 0), "B200": (10, 0)}
HALF = torch.float16
Attend = Callable[..., torch.Tensor]


def inputs(length: int, device, dtype, heads: int = 16, d: int = 64) -> list[torch.Tensor]:
    """Queries, keys and values of one sequence, which want gradients."""
    shape = dict(size=(1, heads, length, d), device=device, dtype=dtype)
    return [torch.randn(**shape, requires_grad=True) for _ in range(3)]


def step(attend: Attend, qkv: Sequence[torch.Tensor]) -> None:
    """Forward and backward."""
    out = attend(*qkv)
    out.backward(torch.ones_like(out))


def simulated(
    attend: Attend,
    length: int,
    dtype=torch.bfloat16,
    heads: int = 16,
    card=None,
    rules=frozenset(RULES),
) -> Footprint:
    """Footprint of one forward and backward, the inputs included. rules: as of `SimulatedGPU`."""
    with SimulatedGPU(card, rules=rules) as gpu:
        qkv = inputs(length, "cuda", dtype, heads)
        gpu.reset_peak()
        step(attend, qkv)
    return gpu.footprint


def estimated(attend: Attend, length: int) -> float:
    """Seconds of one forward and backward on an A100, in bf16."""
    return simulated(attend, length, card="A100-40GB").step_seconds.expected


def peaks_figure(lengths: Sequence[int], peaks: Mapping[str, Sequence[int]]) -> Figure:
    """Bytes at the peak over lengths, both axes logarithmic, each line with its name."""
    fig, ax = show.figure(5, 3.8)
    hues = list(show.COLOURS.values())
    below = {"three lines": 2, "memory-efficient": 3}  # right of and under which point from the end
    for hue, marker, (name, values) in zip(hues, "os^Dvp", peaks.items(), strict=False):
        y = np.array(values) / MiB
        ax.plot(lengths, y, marker + "-", color=hue)
        at, side, shift = max(0, len(lengths) - below.get(name, 2)), "right", (-6, 6)
        if name in below:
            side, shift = "left", (4, -15)
        how = dict(xytext=shift, textcoords="offset points", color=hue, ha=side)
        ax.annotate(name, (lengths[at], y[at]), **how)
    ax.grid(axis="x", visible=False)
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MiB at the peak")
    ax.set_xticks(lengths[::2], [f"{n:,}" for n in lengths[::2]])
    ax.minorticks_off()
    return fig


def tiles_figure(block_masks: Mapping) -> Figure:
    """The tiles that each block mask computes, and their share."""
    fig, (axes,) = show.figure(7.5, 2.9, ncols=len(block_masks), squeeze=False)
    for ax, (name, mask) in zip(axes, block_masks.items(), strict=True):
        some = mask.to_dense()[0, 0].cpu().numpy()
        for i, j in zip(*some.nonzero(), strict=True):
            ax.add_patch(Rectangle((j, i), 0.85, 0.85, fc=show.COLOURS["activations"]))
        ax.set(xlim=(0, len(some)), ylim=(len(some), 0), aspect="equal")
        ax.set_title(f"{name}: {some.mean():.0%} of tiles", fontsize=9)
        ax.set(xticks=[], yticks=[], xlabel="keys")
    axes[0].set_ylabel("queries")
    return fig


def live_dtype(device: torch.device) -> torch.dtype:
    """fp16 on a card, fp32 on a CPU."""
    return HALF if device.type == "cuda" else torch.float32


def measured(attend: Attend, length: int, device: torch.device) -> int:
    """Bytes of tensors at the peak of one head's forward and backward here."""
    qkv = inputs(length, device, live_dtype(device), heads=1)
    step(attend, qkv)  # libraries take their workspaces at the first call
    for x in qkv:
        x.grad = None
    with Meter(device, inputs=qkv) as meter:
        step(attend, qkv)
    if device.type == "cpu":
        return meter.footprint.peak_tensors
    return meter.footprint.breakdown["temporary"] + sum(x.nbytes for x in qkv)


def predicted(attend: Attend, length: int, device: torch.device) -> int:
    """The same, simulated; for a CPU without what only CUDA's kernels take for themselves."""
    card = gpus.gpu_of_device(device_name(device))
    if device.type == "cpu":
        rules = frozenset(RULES) - {"scratch of kernels"}
        return simulated(attend, length, live_dtype(device), 1, card, rules).peak_tensors
    run = simulated(attend, length, live_dtype(device), 1, card)
    return run.peak_allocated - run.breakdown.get("workspaces", 0)


def live_table(ways: Mapping[str, Attend], device: torch.device) -> tuple[dict, pd.DataFrame]:
    """(bytes at three lengths by way, a table of them in MiB with the last one predicted)."""
    lengths, found, guessed = (512, 1024, 2048), {}, {}
    gc.freeze()  # the Meter collects garbage; what is imported is none
    for name, way in ways.items():
        found[name] = [measured(way, n, device) for n in lengths]
        guessed[name] = predicted(way, lengths[-1], device)
    gc.unfreeze()
    frame = pd.DataFrame(found, index=[f"{n:,}" for n in lengths]).T / MiB
    frame["predicted"] = pd.Series(guessed) / MiB
    frame["error"] = show.error(frame["predicted"], frame["2,048"])
    return found, frame


def growth_of(values: Sequence[int]) -> float:
    """By how much more the last doubling added than the one before: 4 is a square, 2 a line."""
    return (values[2] - values[1]) / (values[1] - values[0])


def calls() -> dict[str, tuple[torch.Tensor, dict]]:
    """Calls as one finds them in models: a query, and what else is handed over."""

    def query(dtype, size=64):
        return torch.empty(1, 8, 1024, size, dtype=dtype, device="meta")

    mask = torch.ones(1024, 1024, dtype=torch.bool, device="meta")
    return {
        "fp16": (query(HALF), {}),
        "bf16": (query(torch.bfloat16), {}),
        "fp32": (query(torch.float32), {}),
        "fp16, dropout": (query(HALF), {"dropout_p": 0.1}),
        "fp16, any mask": (query(HALF), {"attn_mask": mask}),
        "fp16, head size 50": (query(HALF, 50), {}),
        "fp16, head size 50, mask": (query(HALF, 50), {"attn_mask": mask}),
        "fp32, head size 50": (query(torch.float32, 50), {}),
        "fp16, head size 320": (query(HALF, 320), {}),
    }


def cudnn_takes(q: torch.Tensor, attn_mask=None, dropout_p: float = 0.0) -> bool:
    """PyTorch's rules for cuDNN, as far as `calls` meet them."""
    size = q.size(-1) % 8 == 0 and q.size(-1) <= 128
    return q.dtype in (HALF, torch.bfloat16) and size and 16 * dropout_p % 1 == 0


def routes() -> pd.DataFrame:
    """The kernel that SDPA takes for each of `calls`, by PyTorch's rules; a column a card."""
    rows = {}
    for name, (q, call) in calls().items():
        rows[name] = [
            "cuDNN"
            if capability[0] in (9, 10) and cudnn_takes(q, **call)
            else sdpa_route(q, q, q, capability=capability, **call)
            for capability in CARDS.values()
        ]
    return pd.DataFrame(rows, index=list(CARDS)).T


def kernel_of(out: torch.Tensor) -> str:
    """The operation that an output has its gradient from."""
    return type(out.grad_fn).__name__.removesuffix("Backward0")


def forbidden(attend: Attend, *qkv: torch.Tensor, **call) -> list[str]:
    """The reasons with which flash refuses a call, and the error."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return [f"taken: {kernel_of(attend(*qkv, **call))}"]
        except RuntimeError as error:
            reasons = [str(w.message).partition(" (Trig")[0] for w in heard]
            return [r for r in reasons if "switched" not in r] + [str(error)]


def on_card(attend: Attend, length: int) -> tuple[str, float]:
    """The kernel that takes a call in bf16 on an A100, and MiB at the peak of a step."""
    with SimulatedGPU("A100-40GB") as gpu:
        qkv = inputs(length, "cuda", torch.bfloat16)
        kernel = kernel_of(attend(*qkv)).removeprefix("ScaledDotProduct")
        gpu.reset_peak()
        step(attend, qkv)
    return kernel, gpu.footprint.peak_tensors / MiB


def on_t4(recipe: Recipe) -> str:
    """Whether a training fits a T4, and what it takes; of one that a T4 refuses, why."""
    try:
        return f"fits, {simulate(recipe, 'T4').peak_allocated / MiB:,.0f} MiB"
    except torch.OutOfMemoryError:
        return "out of memory"
    except ValueError as problem:
        return str(problem)
