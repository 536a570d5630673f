"""Inference: simulated as it is here, its cache by the formula, and what is refused."""

import pytest
import torch
from helpers import SMALL, kv_cache_bytes, refused
from transformers import DeepseekV3Config

from memlab import models, simulate
from memlab.footprint import NOT_TENSORS
from memlab.predict.fit import fits, largest
from memlab.predict.recipe_log import MAX_LAYERS_TO_RUN
from memlab.predict.serving import by_phase, inputs_of
from memlab.spec.serving import Serving
from memlab.trace.tracer import Tracer
from memlab.workloads.generation import Generation

GiB, MiB = 2**30, 2**20
# Four texts: a token of each is a multiple of the allocator's 512 bytes in every cache below.
TINY = Serving("gpt2-tiny", prompt=48, batch_size=4, weights="fp32", attention="eager")


def measure_serving(serving):
    """Every step of it here, traced storage by storage."""
    generation = Generation(serving, "cpu")
    with Tracer() as tracer:
        tracer.watch(generation.model, inputs=inputs_of(generation))
        generation.run(tracer, all_steps=True)
    return by_phase(tracer.footprint())


def tensors(held):
    return {name: n for name, n in held.items() if n and name not in NOT_TENSORS}


@pytest.mark.parametrize("cache", ["dynamic", "fp8", "none"])
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-3-8b-tiny", "t5-3b-tiny"])
def test_simulated_is_what_is_here_by_category_and_phase(model, cache):
    serving = TINY.but(model=model, cache=cache, new_tokens=9)
    card, here = simulate(serving), measure_serving(serving)
    for phase in ("prefill", "decode"):
        assert tensors(getattr(card, phase)) == tensors(getattr(here, phase))
        assert getattr(here, phase)["weights"] > 0
    assert card.footprint.assumptions  # five steps were jumped over, and live none was
    assert not here.footprint.assumptions
    held = here.kv_cache
    assert card.kv_cache == held <= here.decode["kv_cache"]
    if cache == "dynamic":
        # A decoder was fed all but the last token; T5's also has a first one of its own.
        tokens = 48 + (9 if model == "t5-3b-tiny" else 8)
        assert held == kv_cache_bytes(model, tokens, 4, bytes_each=4)
    assert (held == 0) == (cache == "none")


def test_a_static_cache_has_its_size_from_the_beginning():
    serving = TINY.but(cache="static", new_tokens=9)
    card, here = simulate(serving), measure_serving(serving)
    for phase in ("prefill", "decode"):
        a, b = tensors(getattr(card, phase)), tensors(getattr(here, phase))
        # Counters and positions of a few bytes each, which a card's loop keeps on the host.
        assert a == pytest.approx(b, abs=1024)
        room = kv_cache_bytes("gpt2-tiny", 57, 4, bytes_each=4)
        assert a["kv_cache"] == pytest.approx(room, abs=512)


def test_latent_attention_keeps_a_vector_for_all_heads():
    """DeepSeek-V3, arXiv 2412.19437: a latent of 512 numbers and a rotary key of 64."""
    assert kv_cache_bytes(DeepseekV3Config(), 1) == 61 * (512 + 64) * 2
    sizes = SMALL | dict(num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32)
    sizes |= dict(qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
    config = DeepseekV3Config(**sizes, first_k_dense_replace=2)  # without experts
    serving = TINY.but(model=config, new_tokens=16)
    card, here = simulate(serving), measure_serving(serving)
    assert card.kv_cache == here.kv_cache == kv_cache_bytes(config, 63, 4, bytes_each=4)


@pytest.mark.parametrize("prompt", [16, 48])
def test_a_sliding_cache_keeps_its_window(prompt):
    config = models.config("mistral-7b-tiny")
    config.sliding_window = 24
    serving = TINY.but(model=config, prompt=prompt, new_tokens=30)
    card, here = simulate(serving), measure_serving(serving)
    # The window stands in each layer as a number, too, which is the host's at first.
    assert tensors(card.decode) == pytest.approx(tensors(here.decode), abs=64)
    held = kv_cache_bytes(config, 99, 4, bytes_each=4)
    assert here.kv_cache == pytest.approx(held, abs=64) == card.kv_cache
    assert kv_cache_bytes(config, 99) == kv_cache_bytes("mistral-7b-tiny", 24)


def test_layers_of_linear_attention_keep_no_keys():
    """Qwen3.5's config: of 32 layers 8 with 4 heads of keys of 256 numbers."""
    assert kv_cache_bytes("qwen3.5-9b", 131_072) == 8 * 2 * 4 * 256 * 2 * 131_072 == 4 * GiB


def test_states_of_linear_attention_stay_while_steps_are_skipped():
    serving = TINY.but(model="qwen3.5-9b-tiny", new_tokens=9)
    card, here = simulate(serving), measure_serving(serving)
    assert tensors(card.decode)["kv_cache"] == tensors(here.decode)["kv_cache"]


def test_the_loop_writes_what_generate_writes():
    generation = Generation(TINY.but(new_tokens=9))
    given = generation.text
    with Tracer() as tracer:
        generation.run(tracer, all_steps=True)
    how = dict(do_sample=False, max_new_tokens=9, min_new_tokens=9, pad_token_id=0)
    generation.model.generation_config.eos_token_id = None
    theirs = generation.model.generate(given, **how)
    assert torch.equal(generation.text, theirs)


def test_a_deep_model_is_written_out_from_shallow_ones():
    """Against the same model at its own depth."""
    config = models.with_layers("llama-3-8b-tiny", 14)
    serving = TINY.but(model=config, new_tokens=9)
    quick = simulate(serving)
    assert MAX_LAYERS_TO_RUN < 14
    here = measure_serving(serving)
    for phase in ("prefill", "decode"):
        assert tensors(getattr(quick, phase)) == tensors(getattr(here, phase))


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_quantized_weights_take_what_their_layers_keep(weights):
    serving = TINY.but(model="llama-3-8b-tiny", weights=weights, compute_dtype="fp32")
    card, here = simulate(serving), measure_serving(serving)
    assert card.prefill["weights"] == here.prefill["weights"]
    assert card.decode["weights"] < simulate(TINY.but(model="llama-3-8b-tiny")).decode["weights"]


def test_logits_of_the_whole_prompt_are_its_tokens_times_the_vocabulary():
    serving = TINY.but(prompt=200, all_logits=True, new_tokens=1)
    whole, last = simulate(serving), simulate(serving.but(all_logits=False))
    vocabulary = models.config("gpt2-tiny").vocab_size
    assert whole.prefill["logits"] == 4 * 200 * vocabulary * 4
    assert last.peak_allocated < whole.peak_allocated


def test_an_8b_is_what_was_published():
    """vLLM's log of Meta-Llama-3-8B: weights of 14.96 GiB (its pull request 10511)."""
    served = simulate(Serving("llama-3-8b", prompt=4096, new_tokens=64), "A100-80GB")
    assert served.prefill["weights"] / GiB == pytest.approx(14.96, abs=0.005)
    # The blog of Llama 3.1's release: 1k, 16k and 128k tokens in fp16.
    for tokens, gib in ((1024, 0.125), (16_000, 1.95), (128_000, 15.62)):
        assert kv_cache_bytes("llama-3.1-8b", tokens) / GiB == pytest.approx(gib, abs=0.006)
    assert served.kv_cache == kv_cache_bytes("llama-3-8b", 4096 + 63)


def test_the_largest_fits_and_the_next_does_not():
    # A quantized base is served by the allocator as transformers loads it.
    serving = TINY.but(model="llama-3.1-8b-tiny", weights="nf4", new_tokens=2)
    found = largest(serving, 60 * MiB, "prompt")
    assert found.value > 64 and found.next == found.value + 64
    assert found.fit and fits(found.recipe, 60 * MiB)
    assert not fits(found.recipe.but(prompt=found.next), 60 * MiB)
    # The end of a model's positions is no multiple of the search's steps.
    assert largest(Serving("gpt2", new_tokens=16), "T4", "prompt").value == 1024 - 16
    with refused("field is 'seq_len': allowed are batch_size, prompt"):
        largest(serving, "T4", "seq_len")


def test_seconds_are_those_of_the_operations_and_bytes():
    short, long = (simulate(TINY.but(new_tokens=n), "T4") for n in (4, 40))
    assert short.prefill_time == long.prefill_time
    # The decode steps of few tokens take the launches' time, each the same.
    each = [one.decode_time.expected / (n - 1) for one, n in ((short, 4), (long, 40))]
    assert each[1] == pytest.approx(each[0], rel=0.02)
    low, expected, high = long.tokens_per_second
    assert low < expected < high and expected == pytest.approx(4 / each[1])
    assert "tokens/s" in str(long) and long.as_dict()["decode_time"]["parts"]
    assert simulate(TINY.but(new_tokens=1), "T4").tokens_per_second is None
    assert simulate(TINY).decode_time is None  # a card without rates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 0}, "prompt is 0: allowed are whole numbers from 1"),
        ({"cache": "paged"}, "cache is 'paged': allowed are dynamic, static, fp8, none"),
        ({"compute_dtype": "bf16"}, "compute_dtype is 'bf16': allowed are fp32, that of the wei"),
        ({"prompt": 1024}, r"prompt and new_tokens are 1024 \+ 16: gpt2-tiny allows up to 1024 "),
        ({"model": "bert-base"}, "model is 'bert-base', whose task is sequence-class"),
        ({"model": "mistral-7b-tiny", "cache": "fp8"}, "has a sliding window: transformers quan"),
        ({"seq_len": 3}, "a serving has no field 'seq_len': allowed are model, prompt"),
    ],
)
def test_bad_input_is_one_line(changes, message):
    with refused(message):
        TINY.but(**changes)


def test_a_t4_has_no_bf16():
    with refused("bf16"):
        simulate(TINY.but(weights="bf16"), "T4")


# memlab's own generation, all steps, the quicker of two runs: an NVIDIA H100 80GB HBM3, driver
# 580.159.04, PyTorch 2.11.0, transformers 5.23.0, 27 November 2026. Bytes allocated at most in the
# prefill and in decoding, and seconds of the one and of a token of the other.
RECORDED = [
    ("llama-3.2-1b", {}, 2556704256, 2525725184, 0.0129, 0.01153),
    ("llama-3.2-1b", {"prompt": 1024, "batch_size": 32}, 5727991296, 3649223680, 0.1650, 0.01073),
    ("llama-3.2-1b", {"prompt": 16384}, 4121302528, 3061244416, 0.1183, 0.01312),
    ("llama-3-8b", {}, 16223323648, 16189541888, 0.0273, 0.02235),
    ("llama-3-8b", {"prompt": 2048, "batch_size": 16}, 24283735552, 20526447616, 0.9567, 0.02384),
]


@pytest.mark.parametrize(("model", "sizes", "prefill", "decode", "reading", "token"), RECORDED)
def test_generation_on_a_recorded_card(model, sizes, prefill, decode, reading, token):
    tokens = 33 if sizes else 65
    said = simulate(Serving(model, weights="bf16", new_tokens=tokens, **sizes), "H100")
    assert sum(said.prefill.values()) == pytest.approx(prefill, rel=1e-4)
    assert sum(said.decode.values()) == pytest.approx(decode, rel=1e-4)
    assert said.prefill_time.expected == pytest.approx(reading, rel=0.1)
    assert said.decode_time.expected / (tokens - 1) == pytest.approx(token, rel=0.25)
