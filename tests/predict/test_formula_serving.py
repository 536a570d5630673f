"""The form of inference beside the simulation of it."""

import pytest
from helpers import one_line

from memlab import fits, simulate
from memlab.gpus import find_gpu
from memlab.predict.formula_serving import judged, serving_formula
from memlab.spec.serving import Serving

CASES = [
    ("gpt2", "fp32", "T4", 1, 900, 60, False),
    ("gpt2-large", "nf4", "A100-80GB", 16, 500, 5, True),
    ("llama-3.2-1b", "fp16", "H100", 3, 900, 60, False),
    ("llama-3-8b", "int8", "A100-80GB", 16, 500, 1, False),
    ("llama-3.1-8b", "nf4", "T4", 1, 900, 5, False),  # scores of all pairs
    ("llama-2-7b", "nf4", "H100", 1, 128, 5, False),  # an unpacked weight
    ("qwen2.5-0.5b", "fp32", "T4", 1, 500, 40, True),
    ("mistral-7b", "bf16", "A100-80GB", 16, 900, 60, False),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_the_form_says_what_is_simulated(case):
    model, weights, gpu, texts, prompt, new, whole = case
    how = dict(batch_size=texts, prompt=prompt, new_tokens=new, all_logits=whole)
    serving, card = Serving(model, weights=weights, **how), find_gpu(gpu).without_limit()
    form, run = serving_formula(serving, card), simulate(serving, card)
    held = getattr(run, form.pop("phase"))
    assert form["weights"] == pytest.approx(held["weights"], rel=1e-4)
    # GPT-2's many small layers are rounded up to the allocator's blocks.
    within = 0.035 if model.startswith("gpt2") else 0.012
    assert sum(form.values()) == pytest.approx(run.peak_allocated, rel=within)
    for name in ("kv_cache", "activations", "logits"):
        assert form[name] == pytest.approx(held[name], abs=0.01 * run.peak_allocated)


@pytest.mark.parametrize("texts", [30, 70])
def test_what_it_says_of_a_card_is_so(texts):
    serving = Serving("llama-3-8b", prompt=4096, new_tokens=64, batch_size=texts)
    said = judged(serving, "A100-80GB")
    assert said == {30: "fits", 70: "does not fit"}[texts]
    assert fits(serving, "A100-80GB").fits == (said == "fits")


# What random borders found that said fits and did not (benchmarks/serving.py), and why.
BORDERS = {
    "copies of the cache for all heads": ("V100", "qwen2.5-0.5b", "int8", 1063, 52, 500, False),
    "and in half precision": ("T4", "llama-3.2-3b", "fp16", 58, 284, 500, True),
    "blocks of another moment": ("L40S", "qwen2.5-1.5b", "fp32", 10, 5252, 500, True),
    "ends of segments": ("T4", "mistral-7b", "fp16", 2, 137, 2, False),
}


@pytest.mark.parametrize("why", BORDERS)
def test_what_an_allocator_keeps_is_not_said_to_fit(attention_of_2_13, why):
    gpu, model, weights, texts, prompt, new, whole = BORDERS[why]
    how = dict(batch_size=texts, prompt=prompt, new_tokens=new, all_logits=whole)
    serving = Serving(model, weights=weights, **how)
    assert not fits(serving, gpu) and judged(serving, gpu) != "fits"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "gpu"), [("llama-3.2-3b", "T4"), ("qwen2.5-0.5b", "V100")])
@pytest.mark.parametrize("weights", ["fp16", "fp32"])
def test_attention_that_is_not_fused_copies_the_cache_for_a_token(
    attention_of_2_13, model, gpu, weights
):
    serving = Serving(model, weights=weights, prompt=40, new_tokens=90, batch_size=200)
    card = find_gpu(gpu).without_limit()
    form, run = serving_formula(serving, card), simulate(serving, card)
    assert form["phase"] == run.peak_phase == "decode"
    # Beside the copies stand the hidden states of the one token.
    assert form["activations"] == pytest.approx(run.decode["activations"], rel=0.04)
    assert form["kv_cache"] == run.decode["kv_cache"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5-3b"}, "model type is 't5': allowed are gpt2, llama, mistral, qwen2"),
        ({"cache": "static"}, "cache is 'static': the formula allows dynamic"),
        ({"model": "mistral-7b", "prompt": 4096}, "4096 \\+ 16: the formula allows up to 4096 "),
    ],
)
def test_what_the_form_does_not_know_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        serving_formula(Serving("llama-2-7b").but(**changes), "T4")
    one_line(error)
