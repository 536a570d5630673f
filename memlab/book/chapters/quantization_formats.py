"""Formats of few bits: what they store, how they round, and published results."""

from collections.abc import Mapping

import pandas as pd
import torch

from memlab import models
from memlab.book.chapters.patients import error, linears

# (bits of a code, then for each level of constants: bits of one, weights that share it)
STORED = {
    "int8, rows of 4,096": (8, (32, 4096)),
    "fp8, 128 x 128": (8, (32, 128 * 128)),
    "MXFP8": (8, (8, 32)),
    "NF4": (4, (32, 64)),
    "NF4, double": (4, (8, 64), (32, 64 * 256)),
    "int4: GPTQ, AWQ": (4, (16 + 4, 128)),
    "MXFP4": (4, (8, 32)),
    "NVFP4": (4, (8, 16)),
    "GGUF Q4_K": (4, (6 + 6, 32), (16 + 16, 256)),
}


def weights_of(name: str) -> tuple[int, int]:
    """Weights in the linear layers inside a model, and all the others."""
    with torch.device("meta"):
        model = models.build(name)
    inside = sum(m.weight.numel() for m in linears(model).values())
    return inside, model.num_parameters() - inside


def weight_bytes(name: str, bits: float) -> float:
    """Bytes of a model whose linear layers take so many bits per weight, the rest 16."""
    inside, others = weights_of(name)
    return (inside * bits + others * 16) / 8


def bits_on_average(name: str, bits: float) -> float:
    """Bits of a weight over the whole model."""
    return weight_bytes(name, bits) * 8 / sum(weights_of(name))


def model_sizes(bits: Mapping[str, float], names: Mapping[str, str]) -> pd.DataFrame:
    """Bits a weight and GiB of whole models; GGUF rounds embeddings and head as well.

    names: models by the heads of their columns.
    """
    frame = pd.Series(bits, name="bits").to_frame()
    for label, name in names.items():
        frame[label] = [weight_bytes(name, width) / 2**30 for width in frame["bits"]]
        frame.loc["GGUF Q4_K", label] = sum(weights_of(name)) * bits["GGUF Q4_K"] / 2**33
    return frame


def in_8_bits(constants: torch.Tensor) -> torch.Tensor:
    """Constants as double quantization keeps them: in 8 bits around their mean, blocks of 256."""
    middle = constants.mean()
    blocks = (constants - middle).reshape(-1, min(256, constants.numel()))
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=torch.finfo(blocks.dtype).tiny) / 127
    return ((blocks / scale).round() * scale).reshape(constants.shape) + middle


def rounded_twice(weight: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Symmetric codes in blocks, whose scales are `in_8_bits`, as they come back."""
    blocks, highest = weight.reshape(-1, size), 2 ** (bits - 1) - 1
    scale = in_8_bits(blocks.abs().amax(1, keepdim=True) / highest)
    codes = (blocks / scale).round().clamp(-highest, highest)
    return (codes * scale).reshape(weight.shape)


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """A scale as MXFP4 stores it: of the largest number, over E2M1's 4."""
    return torch.exp2(torch.floor(torch.log2(scale * 6)) - 2)


def e4m3(scale: torch.Tensor) -> torch.Tensor:
    """A scale as NVFP4 stores it, under one in fp32 for the tensor."""
    whole = scale.max() / 448  # E4M3's largest
    return (scale / whole).to(torch.float8_e4m3fn).float() * whole


_half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([-_half.flip(0)[:-1], _half])  # 15 values; -0 is 0
INT4 = torch.arange(-7.0, 8)


def formats(nf4: torch.Tensor) -> dict[str, tuple]:
    """Of each 4-bit format its values, the size of its blocks and how a scale is kept."""
    return {
        "int4, blocks of 64": (INT4, 64),
        "NF4": (nf4, 64),
        "NF4, double": (nf4, 64, in_8_bits),
        "MXFP4": (E2M1, 32, power_of_two),
        "NVFP4": (E2M1, 16, e4m3),
    }


def nearest(weight: torch.Tensor, inputs: torch.Tensor, bits: int) -> torch.Tensor:
    """Each weight at its nearest mark, a scale a row; the inputs do not matter."""
    highest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / highest
    return (weight / scale).round() * scale


def awq(weight: torch.Tensor, inputs: torch.Tensor, bits: int) -> torch.Tensor:
    """Columns of large inputs are enlarged before rounding, by the best of eleven powers."""
    size = inputs.abs().mean(0).clamp(min=1e-4)
    scales = [size**power for power in torch.linspace(0, 1, 11).tolist()]
    backs = [nearest(weight * s, inputs, bits) / s for s in scales]
    truth = inputs @ weight.T
    return min(backs, key=lambda back: error(truth, inputs @ back.T))


def gptq(weight: torch.Tensor, inputs: torch.Tensor, bits: int) -> torch.Tensor:
    """Column by column; those to come make up for the error."""
    together = inputs.T @ inputs
    together.diagonal().add_(0.01 * together.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(together), upper=True)
    highest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1) / highest
    left, back = weight.clone(), torch.empty_like(weight)
    for i in range(weight.shape[1]):
        codes = (left[:, i] / scale).round().clamp(-highest, highest)
        back[:, i] = codes * scale
        off = (left[:, i] - back[:, i]) / upper[i, i]
        left[:, i:] -= torch.outer(off, upper[i, i:])
    return back


METHODS = {"nearest mark": nearest, "AWQ": awq, "GPTQ": gptq}


# Of llama.cpp's table for Llama 3 8B: GiB, perplexity, and with "WT 10m" data.
GGUF = {
    "f16": (14.97, 6.233, None),
    "Q8_0": (7.96, 6.234, None),
    "Q6_K": (6.14, 6.253, None),
    "Q5_K_M": (5.33, 6.289, None),
    "Q4_K_M": (4.58, 6.407, 6.383),
    "Q3_K_M": (3.74, 6.888, 6.734),
    "Q2_K": (2.96, 9.752, 8.648),
}


def gguf_quality() -> pd.DataFrame:
    """The published perplexities with bits per weight, and how much is added to f16's."""
    frame = pd.DataFrame(GGUF, index=["GiB", "perplexity", "with data"]).T.astype(float)
    frame.insert(0, "bits", frame.pop("GiB") * 2**33 / sum(weights_of("llama-3-8b")))
    frame.insert(2, "more", frame["perplexity"] / frame["perplexity"]["f16"] - 1)
    return frame


# LLM.int8, table 1: perplexity on C4 by model size.
INT8_SIZES = ["125M", "1.3B", "2.7B", "6.7B", "13B"]
INT8_PERPLEXITY = {
    "32-bit floats": [25.65, 15.91, 14.43, 13.30, 12.45],
    "8 bits, a tensor": [87.76, 16.55, 15.11, 14.59, 19.08],
    "8 bits, zero point": [56.66, 16.24, 14.76, 13.49, 13.94],
    "8 bits, a vector": [35.84, 16.82, 14.98, 14.13, 16.48],
    "LLM.int8": [25.83, 15.93, 14.44, 13.24, 12.45],
}


def int8_quality() -> pd.DataFrame:
    return pd.DataFrame(INT8_PERPLEXITY, index=INT8_SIZES).T
