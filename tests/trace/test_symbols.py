"""Numbers at chosen sizes say which sizes they are made of."""

import itertools
import math

import pytest
from helpers import refused

from memlab.trace.symbols import ROUNDED, Symbols, chosen_sizes, factors_of, largest_prime

# Widths, vocabularies and heads of llama-3-8b, qwen2.5-7b, gpt2, TinyLlama.
MODELS = [
    {4096, 14336, 128256, 1024, 32, 128},
    {3584, 18944, 152064, 512, 28, 4},
    {768, 3072, 50257, 1024, 12},
    {2048, 5632, 32000, 256},
]
KINDS = list(itertools.product(MODELS, (True, False), (16, 8, 4, 2, 1), (True, False)))


@pytest.mark.parametrize(("own", "one", "alignment", "inside"), KINDS)
def test_a_number_is_read_and_put_together_again_at_other_sizes(own, one, alignment, inside):
    asked = {"one_sequence": one, "alignment": alignment, "inside": inside, "rank": 256}
    sizes = chosen_sizes(own, **asked, sums={"c": ("s", 2), "p": ("P", 2)})
    assert math.gcd(sizes["s"], 16) == alignment
    assert (sizes["b"] == 1) == one and (sizes["w"] > sizes["s"]) == inside
    symbols, here = Symbols(sizes), factors_of(sizes)
    other = {"b": 1 if one else 6, "s": 5 * 16 * alignment + alignment, "r": 8, "P": 2048, "w": 96}
    there = factors_of(other | {"c": other["s"] + 2, "p": 2050})
    made = ["b", "s", "r", "P", "w", "s+1", "s-1", "c", "p", *(f"s~{n}" for n in ROUNDED)]
    for constant, first, second in itertools.product((1, 4, 2 * max(own)), made, made):
        number = constant * here[first] * here[second]
        assert symbols.term(number).at(there) == constant * there[first] * there[second]
    for number in own | {0, 1, 512, 2**20}:
        assert symbols.term(number).at(there) == number


def test_five_products_are_no_further_size_of_a_head():
    """Also where the other sizes have the powers of two that such a size would have."""
    sizes = chosen_sizes(
        MODELS[0], one_sequence=False, alignment=16, inside=True, rank=None, widths=(160, 68)
    )
    symbols = Symbols(sizes | {"d": 160, "g": 68})
    operations = symbols.term(2 * 5 * 4 * sizes["b"] * 68 * sizes["s"] ** 2 * 160, whole=True)
    other = {"b": 3, "s": 512, "g": 16, "d": 64}
    assert operations.at(factors_of(other)) == 2 * 5 * 4 * 3 * 16 * 512**2 * 64


def test_a_part_of_a_length_is_rounded_up():
    sizes = chosen_sizes(MODELS[0], one_sequence=False, alignment=16, inside=True, rank=None)
    chunks = Symbols(sizes).term(sizes["b"] * -(-sizes["s"] // 64))
    assert chunks.at(factors_of({"b": 3, "s": 208})) == 3 * 4


def test_a_model_that_has_every_prime_has_no_sizes():
    primes = {n for n in range(2, 21000) if largest_prime(n) == n}
    with refused("no sizes"):
        chosen_sizes(primes, one_sequence=True, alignment=16, inside=True, rank=None)
