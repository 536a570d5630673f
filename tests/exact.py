"""Number formats from their definition: what a code means, and the code that stores a number."""

import math

import ml_dtypes
import numpy as np

# Each small float by a library: its dtype there, and the dtype of its codes.
ML_DTYPES = {
    "bf16": (ml_dtypes.bfloat16, np.uint16),
    "fp16": (np.float16, np.uint16),
    "fp8 E5M2": (ml_dtypes.float8_e5m2, np.uint8),
    "fp8 E4M3": (ml_dtypes.float8_e4m3fn, np.uint8),
    "fp4 E2M1": (ml_dtypes.float4_e2m1fn, np.uint8),
}


def value(known, code):
    """The number that a code means, from the definition; an infinity or NaN, too."""
    top = 1 << (known.bits - 1)
    if not known.exponent:
        return float(code - 2 * top if code >= top else code)
    sign = -1 if code & top else 1
    field, rest = (code % top) >> known.mantissa, code % (1 << known.mantissa)
    ones = (1 << known.exponent) - 1
    if known.special == "ieee" and field == ones:
        return math.nan if rest else sign * math.inf
    if known.special == "nan" and code % top == top - 1:
        return math.nan
    steps = rest + (bool(field) << known.mantissa)
    return sign * math.ldexp(steps, max(field, 1) - known.bias - known.mantissa)


def roundings(known):
    """(x, the code that stores it) from 0 up: numbers, the ties between two, a bit below and above.

    Some 1,000 pairs of neighbours of each format, the smallest and the largest among them.
    """
    real = np.float32 if known.ties == "away" else np.float64  # tf32 is made of fp32

    def beside(x, towards):
        return float(np.nextafter(real(x), real(towards)))

    top = 1 << (known.bits - 1)
    last = top - 1 - {"ieee": 1 << known.mantissa, "nan": 1, "none": 0}[known.special]
    for code in [*range(0, last, 1 + last // 997), last - 1]:
        low, high = value(known, code), value(known, code + 1)
        tie = (low + high) / 2
        # To the even code; where the mantissa is empty, to the larger number, but zero is even.
        up = code if known.exponent and not known.mantissa else code % 2
        yield from ((low, code), (beside(tie, 0), code), (beside(tie, math.inf), code + 1))
        yield tie, code + 1 if up or known.ties == "away" else code
    beyond = last + (known.special == "ieee")  # the code of infinity follows the largest
    tie = high + (high - low) / 2
    yield from ((high, last), (beside(tie, 0), last), (tie, beyond), (math.inf, beyond))
