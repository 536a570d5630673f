"""Number formats by exact arithmetic, which is slow and right."""

import math
import random
from fractions import Fraction
from itertools import pairwise

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
    """What a code stands for, from the definition: a Fraction, an infinity or NaN."""
    top = 1 << (known.bits - 1)
    if not known.exponent:
        return Fraction(code - 2 * top if code >= top else code)
    sign = -1 if code & top else 1
    field, rest = (code % top) >> known.mantissa, code % (1 << known.mantissa)
    ones = (1 << known.exponent) - 1
    if known.special == "ieee" and field == ones:
        return math.nan if rest else sign * math.inf
    if known.special == "nan" and code % top == top - 1:
        return math.nan
    size = Fraction(rest, 1 << known.mantissa) + bool(field)
    return sign * size * Fraction(2) ** (max(field, 1) - known.bias)


def finite(known):
    """The numbers of a small format, from 0 up, each with its code."""
    codes = range(1 << (known.bits - 1))
    pairs = [(value(known, code), code) for code in codes]
    return [(number, code) for number, code in pairs if isinstance(number, Fraction)]


def exact_code(known, x, numbers):
    """The nearest code, by exact arithmetic and a search; None for NaN, which may have many."""
    if math.isnan(x):
        return None
    top = 1 << (known.bits - 1)
    negative = math.copysign(1, x) < 0
    largest, last = numbers[-1]
    beyond = last + (known.special == "ieee")  # the code of infinity follows the largest
    if math.isinf(x):
        code = beyond
    else:
        exact = abs(Fraction(x))
        low, high = 0, len(numbers)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if numbers[middle][0] <= exact else (low, middle)
        below, code = numbers[low]
        ulp = largest - numbers[-2][0]
        above, upper = numbers[low + 1] if low + 1 < len(numbers) else (largest + ulp, beyond)
        up, down = above - exact, exact - below
        # At a tie an even code; where the mantissa is empty, the larger number, but zero is even.
        odd = low and (code % 2 == 1 or not known.mantissa) if known.exponent else code % 2 == 1
        if up < down or (up == down and odd):
            code = upper
    if not known.exponent:
        if negative and (code == last and abs(x) >= largest + Fraction(1, 2)):
            return top
        return (2 * top - code) % (2 * top) if negative else code
    return code + top if negative else code


def interesting(known, count=400, seed=0):
    """Doubles: every landmark, ties and their neighbours, subnormals, random ones of all sizes."""
    source = random.Random(seed + known.bits)
    found = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308, 1 / 3, 0.1]
    numbers = finite(known)
    pairs = list(pairwise(numbers))
    for (a, _), (b, _) in source.sample(pairs, min(len(pairs), 150)) + pairs[-1:] + pairs[:1]:
        tie = float((a + b) / 2)
        found += [float(a), tie, math.nextafter(tie, math.inf), math.nextafter(tie, 0)]
    edge = known.largest
    ulp = float(numbers[-1][0] - numbers[-2][0])
    found += [edge, edge + ulp / 2, math.nextafter(edge + ulp / 2, 0), edge + ulp, 3 * edge]
    low, high = math.log2(known.smallest) - 3, math.log2(known.largest) + 2
    found += [source.uniform(1, 2) * 2 ** source.uniform(low, high) for _ in range(count)]
    return found + [-x for x in found]
