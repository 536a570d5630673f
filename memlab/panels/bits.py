"""Number formats as bit fields, and a panel that shows any number in all of them."""

from dataclasses import asdict, dataclass

from memlab.panels.panel import Panel


@dataclass(frozen=True)
class Format:
    """A signed number format; the chapter on number formats derives its limits from these fields.

    exponent, mantissa: widths in bits; an exponent of 0 bits means an integer in two's complement.
    special: the meaning of the largest codes of a float. `ieee`: an exponent field of all ones is
        infinity or NaN. `nan`: only the code of all ones is NaN, and there is no infinity. `none`:
        all codes are numbers.
    overflow: what a number beyond the largest becomes: `infinity` or `largest`.
    ties: how a number halfway between two others is rounded: to the one that ends in 0 (`even`), or
        `away` from zero. Without a mantissa both end in 1, and `even` takes the larger one (IEEE
        754-2019, section 4.3.1).
    stored: bits in memory, if tensors do not store the format in its own size.
    """

    name: str
    exponent: int
    mantissa: int
    special: str = "ieee"
    overflow: str = "infinity"
    ties: str = "even"
    stored: int | None = None


FORMATS = (
    Format("fp32", 8, 23),
    # Not a storage type: tensor cores round fp32 inputs to it (NVIDIA, "TF32 Tensor Cores"), by
    # the rounding of PTX's `cvt.rna.tf32.f32`, and tensors stay in fp32.
    Format("tf32", 8, 10, ties="away", stored=32),
    Format("bf16", 8, 7),
    Format("fp16", 5, 10),
    # FP8 Formats for Deep Learning, arXiv:2209.05433. The converter chooses what overflow becomes:
    # PyTorch stores the largest number since 2.12 (pytorch/pytorch#178817), and stored NaN before.
    Format("fp8 E5M2", 5, 2),
    Format("fp8 E4M3", 4, 3, special="nan", overflow="largest"),
    # E2M1: OCP Microscaling Formats (MX) v1.0. E3M0 has no standard. It follows the same rules
    # without a mantissa, so it has zero and powers of two only.
    Format("fp4 E2M1", 2, 1, special="none", overflow="largest"),
    Format("fp4 E3M0", 3, 0, special="none", overflow="largest"),
    Format("int16", 0, 15, special="none", overflow="largest"),
    Format("int8", 0, 7, special="none", overflow="largest"),
    Format("int4", 0, 3, special="none", overflow="largest"),
)


class BitExplorer(Panel):
    """Type a number or flip a bit, and see it in every format."""

    kind = "bits"
    still = (
        "This panel needs scripts. It shows any number that you type in every format, bit by bit."
    )

    def data(self) -> dict:
        return {"formats": [asdict(number_format) for number_format in FORMATS]}
