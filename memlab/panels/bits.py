"""Number formats as bits, and a page element that shows any number in all of them."""

from dataclasses import asdict, dataclass

from memlab.panels.panel import Panel


@dataclass(frozen=True)
class Format:
    """A signed number format of the panel; chapter 2 derives its limits from these fields.

    exponent, mantissa: bits; exponent 0 is an integer in two's complement.
    special: what the largest codes of a float mean: `ieee` (exponent field all ones: infinity and
        NaN), `nan` (all ones: NaN, no infinity) or `none`.
    overflow: what a number beyond the largest becomes, `infinity` or `largest`.
    ties: a number halfway between two goes to the one that ends in 0 (`even`; with no mantissa,
        where both end in 1, to the larger one: IEEE 754-2019, section 4.3.1) or `away` from zero.
    stored: bits that a number takes in memory where it has none of its own size.
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
    # NVIDIA's "TF32 Tensor Cores" rounds fp32 inputs to it; the rounding is that of PTX's
    # `cvt.rna.tf32.f32`. It is no type of its own: tensors stay in fp32.
    Format("tf32", 8, 10, ties="away", stored=32),
    Format("bf16", 8, 7),
    Format("fp16", 5, 10),
    # FP8 Formats for Deep Learning, arXiv:2209.05433. Overflow is the converter's choice: torch
    # from 2.12 on stores the largest number (pytorch/pytorch#178817), before it NaN.
    Format("fp8 E5M2", 5, 2),
    Format("fp8 E4M3", 4, 3, special="nan", overflow="largest"),
    # E2M1: OCP Microscaling Formats (MX) v1.0. E3M0 has no standard: the same rules with no
    # mantissa, so powers of two and zero.
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
