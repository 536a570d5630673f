"""What the chapter on quantization measures: a pass, errors, harm, stored and computed types."""

import inspect
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import models
from memlab.book.chapters.patients import TINY, Patients, error, mean_and_spread
from memlab.book.chapters.quantization_formats import METHODS, STORED, formats, rounded_twice
from memlab.card.device import SimulatedGPU
from memlab.footprint import Footprint
from memlab.gpus import find_gpu
from memlab.libraries import import_bitsandbytes
from memlab.predict.measure import Meter, seconds
from memlab.spec.recipe import Recipe
from memlab.trace.quantized_weights import constants
from memlab.workloads.quantized import quantize_base


def one_pass(name: str, base: str = "fp16", card: str | None = None) -> Footprint:
    """The footprint of one forward pass over 512 tokens, in fp16, on a simulated card.

    base: fp16 leaves the weights so; nf4, fp4 (with double quantization) and int8 store the
        linear layers so. card: of this kind, however much it takes.
    """
    with SimulatedGPU(find_gpu(card).without_limit()) as gpu:
        model = models.build(name, dtype=torch.float16)
        if base != "fp16":
            how = dict(base=base, double_quant=base != "int8", lora_rank=1)
            quantize_base(model, Recipe(name, compute_dtype="fp16", **how))
        model.to("cuda")
        gpu.reset_peak()
        ids = torch.zeros(1, 512, dtype=torch.long, device="cuda")
        with torch.no_grad():
            generating = "logits_to_keep" in inspect.signature(model.forward).parameters
            model(input_ids=ids, **({"logits_to_keep": 1} if generating else {}))
    return replace(gpu.footprint, step_time=None)  # it is no training step


def beside_weights(run: Footprint) -> int:
    """Bytes at the peak that are not parameters."""
    return run.peak_allocated - run.breakdown["parameters"]


def errors_by_kind(affine: Callable, symmetric: Callable) -> pd.DataFrame:
    """Relative errors of both ways, in 8 and in 4 bits, of normal and of skewed numbers."""
    torch.manual_seed(0)
    normal = torch.randn(100_000)
    kinds = {"normal": normal, "ReLU": normal.relu()}
    kinds["GELU"] = torch.nn.functional.gelu(normal)
    kinds["softmax"] = (3 * normal.reshape(-1, 100)).softmax(-1)
    rows = {}
    kinds["normal, blocks of 64"] = normal[:64_000].reshape(-1, 64)
    for name, x in kinds.items():
        dim = 1 if "blocks" in name else ()
        rows[name] = {}
        for bits in (8, 4):
            rows[name] |= _errors_of_both(x, bits, dim, affine, symmetric)
    return pd.DataFrame(rows).T


def _errors_of_both(
    x: torch.Tensor, bits: int, dim: int | tuple, affine: Callable, symmetric: Callable
) -> dict[str, float]:
    """Relative errors by the names of `errors_by_kind`'s columns."""
    codes, scale, zero = affine(x, bits, dim)
    straight, one_scale = symmetric(x, bits, dim)
    return {
        f"{bits}: asymmetric": error(x, scale * (codes - zero)),
        f"{bits}: symmetric": error(x, straight * one_scale),
    }


BLOCKS = (256, 128, 64, 32, 16)


def errors_by_bits(weight: torch.Tensor, rounded: Callable) -> dict[tuple, tuple[float, float]]:
    """(bits per weight, error) by (bits of a code, group, bits of a constant).

    rounded: (weight, bits, group) -> the weight as it comes back, with constants in fp32.
    """
    shares = {"tensor": weight.numel(), "row": weight.shape[1]} | {size: size for size in BLOCKS}
    points = {}
    for bits in (3, 4, 5):
        for group, share in shares.items():
            back = rounded(weight, bits, group)
            points[bits, group, 32] = bits + 32 / share, error(weight, back)
        for size in BLOCKS:
            back = rounded_twice(weight, bits, size)
            points[bits, size, 8] = bits + 8 / size + 32 / (256 * size), error(weight, back)
    return points


def agreement(codes: torch.Tensor, matrix: torch.Tensor, device: torch.device) -> tuple:
    """Codes of NF4 in blocks of 64 beside bitsandbytes': (share of equal bytes, its error)."""
    flat = codes.flatten()
    packed = (flat[0::2] << 4 | flat[1::2]).to(torch.uint8)  # two a byte
    bnb = import_bitsandbytes("this chapter").functional
    stored, state = bnb.quantize_4bit(matrix.to(device), blocksize=64, quant_type="nf4")
    back = bnb.dequantize_4bit(stored, state).cpu()
    same = (packed == stored.flatten().cpu()).float().mean().item()
    return same, error(matrix, back)


def compared_formats(
    blockwise: Callable, nf4: torch.Tensor, patients: Patients, trained: torch.Tensor
) -> pd.DataFrame:
    """Bits, errors of normal numbers and of a trained matrix, and what is added to the loss.

    blockwise: (numbers, values, size, keep) -> the numbers as they come back.
    """
    torch.manual_seed(0)
    samples = {"normal": torch.randn(512, 256), "trained": trained.cpu()}
    rows, stored = {}, STORED | {"int4, blocks of 64": STORED["NF4"]}
    for name, how in formats(nf4).items():

        def change(x: torch.Tensor, how: tuple = how) -> torch.Tensor:
            return blockwise(x.cpu(), *how).to(x.device)

        code, *levels = stored[name]
        rows[name] = {"bits": code + sum(bits / share for bits, share in levels)}
        rows[name] |= {label: error(x, change(x)) for label, x in samples.items()}
        rows[name]["added to the loss"] = mean_and_spread(patients.harm_of(change))
    return pd.DataFrame(rows).T


def compared_methods(
    patients: Patients, weight: torch.Tensor
) -> tuple[pd.DataFrame, dict[str, list[float]], dict[str, float]]:
    """Roundings that look at inputs: (table, harm in 2 bits, error of a 4-bit layer's output).

    The layer has new inputs whose every fiftieth feature is thirty times as large as the rest.
    """
    torch.manual_seed(0)
    inputs = torch.randn(8192, weight.shape[1], device=weight.device)
    inputs[:, ::50] *= 30
    known, new = inputs.chunk(2)
    rows, harmed, outputs = {}, {}, {}
    for name, method in METHODS.items():
        three = patients.harm_with_inputs(method, 3)
        harmed[name] = patients.harm_with_inputs(method, 2)
        outputs[name] = error(new @ weight.T, new @ method(weight, known, 4).T)
        shown = mean_and_spread(three), mean_and_spread(harmed[name]), f"{outputs[name]:.1%}"
        rows[name] = dict(zip(("3 bits", "2 bits", "large features"), shown, strict=True))
    return pd.DataFrame(rows).T, harmed, outputs


class Counting(TorchDispatchMode):
    """`seen` counts matrix products and quantizing operations by name and types."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = call(*args, **(kwargs or {}))
        name = call.name().split("::")[1]
        if any(word in name for word in ("mm", "4bit", "quant")):
            into = [t.dtype for t in args if isinstance(t, torch.Tensor)]
            first = result[0] if isinstance(result, tuple) else result
            self.seen[name, *map(str, into), str(first.dtype)] += 1
        return result


def nf4_twin(device: torch.device) -> torch.nn.Module:
    """The twin of Llama 3.2 1B with an NF4 base that computes in bf16."""
    twin = models.build(TINY, dtype=torch.bfloat16)
    quantize_base(twin, Recipe(TINY, base="nf4", lora_rank=1, compute_dtype="bf16"))
    return twin.to(device)


def counted_pass(model: torch.nn.Module, words: torch.Tensor) -> tuple[Counting, bool]:
    """The types of a second forward pass, and whether it found the bytes and results unchanged."""
    stored = [p for p in model.parameters() if p.dtype == torch.uint8]
    before = [p.detach().clone() for p in stored]
    with torch.no_grad():
        first = model(input_ids=words).logits
        with Counting() as counting:
            second = model(input_ids=words).logits
    same = all(torch.equal(a, b) for a, b in zip(before, stored, strict=True))
    return counting, same and torch.equal(first, second)


def _layer(form: str, weight: torch.Tensor, device: torch.device | str) -> torch.nn.Parameter:
    bnb = import_bitsandbytes("this chapter")
    if form == "int8":
        how = dict(bias=False, has_fp16_weights=False)
        layer = bnb.nn.Linear8bitLt(weight.shape[1], weight.shape[0], **how)
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False)
        return layer.to(device).weight
    how = dict(quant_type="nf4", compress_statistics=form == "NF4, double")
    return bnb.nn.Params4bit(weight, requires_grad=False, **how).to(device)


def layer_bits(device: torch.device) -> pd.DataFrame:
    """Bits a weight of bitsandbytes' layers of 2,048 x 2,048.

    Predicted are codes and constants. Measured are the bytes of all tensors on
    the device that is here; simulated is what a card's allocator gives out.
    """
    rows, stored = {}, STORED | {"int8": (8, (32, 2048))}
    for form in ("int8", "NF4", "NF4, double"):
        code, *levels = stored[form]
        bits = code + sum(width / share for width, share in levels)
        made = _layer(form, torch.randn(2048, 2048), device)
        kept = made.nbytes + sum(t.nbytes for t in constants(made))
        with SimulatedGPU():
            made = _layer(form, torch.randn(2048, 2048, dtype=torch.float16), "cuda")
            given = torch.cuda.memory_allocated()
        found, simulated = (8 * count / 2048**2 for count in (kept, given))
        rows[form] = [bits, found, simulated, bits / found - 1]
    return pd.DataFrame(rows, index=["predicted", "measured", "simulated", "error"]).T


def step_costs(
    pair: Mapping[str, torch.nn.Module], rows: torch.Tensor
) -> tuple[dict[str, int], float]:
    """Bytes at the peak of a forward and backward pass, and the first's seconds over the second's.

    rows: token ids. The times are medians of twelve rounds in which both take turns.
    """

    def step(model: torch.nn.Module) -> None:
        model(input_ids=rows, labels=rows).loss.backward()
        model.zero_grad()

    peaks = {}
    for name, model in pair.items():
        with Meter(rows.device, model) as meter:
            step(model)
        peaks[name] = meter.footprint.peak_tensors
    one, other = pair.values()
    ratios = [seconds(lambda: step(one)) / seconds(lambda: step(other)) for _ in range(12)]
    return peaks, statistics.median(ratios)
