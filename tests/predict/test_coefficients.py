"""Coefficients of a way of training that nobody has asked for yet."""

import pytest
from helpers import assert_close

from memlab import Recipe, formula
from memlab.predict import closed_form
from memlab.predict import coefficients as derivation
from memlab.predict.coefficients import adopt, derive


@pytest.fixture
def nothing_known(monkeypatch):
    known = {"terms": [], "halves": {}, "versions": {}, "kept": set()}
    for module in (closed_form, derivation):
        monkeypatch.setattr(module, "coefficients", lambda: known)
    closed_form.tables.cache_clear()
    yield known
    closed_form.tables.cache_clear()


def test_it_derives_what_it_does_not_know(nothing_known):
    recipe = Recipe(
        "gpt2-medium", batch_size=2, seq_len=256, lora_rank=4, optimizer="sgd", accumulation=3
    )
    with pytest.raises(ValueError, match="derive") as error:
        formula(recipe)
    assert "\n" not in str(error.value)
    derive(recipe)
    assert_close(recipe, "T4")
    assert_close(recipe.but(seq_len=64, batch_size=8, lora_rank=16))
    # Another optimizer needs the other half only, and another accumulation nothing.
    formula(recipe.but(accumulation=8))
    passes = len(nothing_known["halves"])
    derive(recipe.but(optimizer="adamw_torch"))
    assert len(nothing_known["halves"]) == passes + 1


def test_coefficients_made_elsewhere_are_adopted(nothing_known, monkeypatch):
    recipe, other = Recipe("gpt2-tiny", seq_len=32), Recipe("bert-base-tiny", seq_len=32)
    derive(recipe)
    wanted = formula(recipe, "T4")
    here = {"terms": [], "halves": {}, "versions": {}, "kept": set()}
    for module in (closed_form, derivation):
        monkeypatch.setattr(module, "coefficients", lambda: here)
    derive(other)  # so that terms have other places
    adopt(nothing_known)
    assert formula(recipe, "T4") == wanted


def test_what_is_of_other_releases_is_derived_anew(nothing_known, monkeypatch):
    recipe = Recipe("gpt2-tiny", seq_len=32)
    derive(recipe)
    wanted = formula(recipe)
    keys = closed_form.read(recipe)[:2]
    for key in keys:
        nothing_known["halves"][key] = nothing_known["halves"][key] | {"moments": []}
    nothing_known |= {"versions": {"torch": "1.13.1"}, "kept": set(keys)}
    derive(recipe)
    assert formula(recipe) == wanted and wanted.assumptions == ()


def test_a_card_without_flash_attention_has_coefficients_of_its_own(nothing_known):
    """Keys that heads share are repeated there, and all weights held."""
    recipe = Recipe("llama-3.2-1b-tiny", seq_len=256, precision="fp16-amp", attention="sdpa")
    derive(recipe)
    with pytest.raises(ValueError, match="no coefficients for .* on T4"):
        formula(recipe, "T4")
    derive(recipe, "T4")
    assert_close(recipe, "T4")
    assert formula(recipe, "V100").peak_allocated > formula(recipe, "L4").peak_allocated


def test_clipping_reads_and_writes_the_gradients(nothing_known):
    recipe = Recipe("gpt2", seq_len=64, max_grad_norm=1.0)
    derive(recipe)
    assert_close(recipe, "T4")
    derive(recipe.but(max_grad_norm=0.0))
    clipped, plain = (formula(recipe.but(max_grad_norm=n), "T4").step_seconds for n in (1.0, 0.0))
    assert clipped.expected > plain.expected


def test_a_size_that_is_no_product_is_not_taken_for_one():
    with pytest.raises(ValueError, match="no product of dimensions"):
        derivation._term(2**31 - 1)
