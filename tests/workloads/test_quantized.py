"""4-bit and 8-bit bases: what is quantized, what it takes, and what CUDA adds for a moment."""

import pytest
import torch
import transformers
from helpers import QLORA, SMALL, refused
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from memlab import Recipe, models, simulate
from memlab.libraries import import_bitsandbytes
from memlab.predict.recipe_log import assumed
from memlab.trace.tracer import Tracer
from memlab.workloads.quantized import to_be_quantized
from memlab.workloads.training import Training

bitsandbytes = import_bitsandbytes("this test")


def layers(model, kind):
    return {name for name, module in model.named_modules() if isinstance(module, kind)}


@pytest.mark.parametrize("base", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("model", ["llama-3-8b-tiny", "gpt2-tiny", "bert-large-tiny"])
def test_every_linear_layer_but_the_head_is_quantized(model, base):
    plain = models.build(model)
    linear = layers(plain, (torch.nn.Linear, Conv1D)) - {"lm_head", "classifier"}
    training = Training(QLORA.but(model=model, base=base))
    kind = bitsandbytes.nn.Linear8bitLt if base == "int8" else bitsandbytes.nn.Linear4bit
    quantized = {
        name.removeprefix("base_model.model.").removesuffix(".base_layer")
        for name in layers(training.model.get_base_model(), kind)
    }
    assert quantized == linear
    assert training.parameters == Training(QLORA.but(model=model, base="none")).parameters


@pytest.mark.parametrize("family", ["phimoe", "llama4_text", "qwen3_moe"])
def test_a_router_is_quantized_where_transformers_does_so(family):
    """A subclass of `nn.Linear` is not, whatever it is for: it may compute otherwise."""
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[family](**SMALL)
        model = models.build(config)
        ours = set(to_be_quantized(model))
        asked = transformers.BitsAndBytesConfig(load_in_4bit=True)
        replace_with_bnb_linear(model, get_keys_to_not_convert(model), asked)
    assert ours == layers(model, bitsandbytes.nn.Linear4bit) != set()
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    recipe = QLORA.but(model=config, lora_targets=targets)
    assert simulate(recipe).peak_allocated > 0


def test_how_little_of_a_mixture_4_bits_reach_is_said():
    """Qwen3-30B-A3B: attention's 905,969,664 of 30,532,122,624 weights."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    sizes |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    config = transformers.Qwen3MoeConfig(**sizes)
    said, *others = assumed(QLORA.but(model=config))
    assert said == (
        "nf4 quantizes 3.0% of the weights: what is not in a plain linear layer, such as experts "
        "and embeddings, stays unquantized"
    )
    assert assumed(QLORA.but(model=config, base="none")) == ()
    assert assumed(QLORA.but(model="llama-3-8b")) == tuple(others)


def test_an_answer_says_in_which_format_the_rest_of_a_base_is():
    """Libraries differ: PEFT casts it, and TRL's trainers, which did, no longer do."""
    cast, left = assumed(QLORA)[-1], assumed(QLORA.but(upcast=False))[-1]
    assert "is cast to fp32" in cast and "stays in 16 bits" in left
    assert cast in simulate(QLORA).assumptions
    assert "base" not in " ".join(assumed(QLORA.but(precision="fp32", compute_dtype="fp32")))


def test_what_a_family_keeps_in_fp32_is_not_quantized():
    """T5 asks its `wo` for the dtype of its weight, and computes in that."""
    training = Training(QLORA.but(model="t5-3b-tiny"))
    quantized = layers(training.model, bitsandbytes.nn.Linear4bit)
    assert quantized and not any("wo" in name.split(".") for name in quantized)
    assert training.step() > 0


def test_the_rest_is_cast_to_fp32_unless_told_not_to():
    for upcast, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = Training(QLORA.but(upcast=upcast)).model
        kept = [p for n, p in model.named_parameters() if "norm" in n or "embed" in n]
        assert {p.dtype for p in kept} == {dtype}


def test_beside_a_base_in_fp16_what_must_be_is_in_fp32():
    """A head, whose gradients loss scaling refuses in fp16, and what from_pretrained leaves so."""
    base = QLORA.but(upcast=False, precision="fp16-amp", compute_dtype="fp16")

    def formats(recipe, part):
        weights = Training(recipe).model.named_parameters()
        return {weight.dtype for name, weight in weights if part in name}

    classifier = base.but(model="bert-large-tiny")
    assert formats(classifier, "classifier") == {torch.float32}
    assert formats(classifier, "word_embeddings") == {torch.float16}
    assert simulate(classifier, "T4").peak_allocated  # or the scaler's refusal
    t5 = base.but(model="t5-3b-tiny")
    assert formats(t5, ".wo.base_layer") == {torch.float32}
    assert formats(t5, "layer_norm") == {torch.float16}
    t5 = t5.but(precision="bf16", compute_dtype="bf16")
    assert formats(t5, ".wo.base_layer") == {torch.bfloat16}


def test_bfloat16_products_need_a_card_that_has_them():
    with refused("T4 has no native bfloat16"):
        simulate(QLORA.but(precision="fp32", compute_dtype="bf16"), "T4")


def test_the_rows_largest_values_stay_parameters_after_the_first_product():
    """8-bit layers take them over from their weights, where nothing else would find them."""
    training = Training(QLORA.but(base="int8"), "cpu")

    def held():
        tracer = Tracer()
        tracer.watch(training.model)
        with tracer:
            pass
        return tracer.footprint().breakdown["parameters"]

    before = held()
    training.step()
    assert held() == before


def test_layers_by_transformers_own_code_are_said():
    assert "flash-linear-attention" in " ".join(assumed(Recipe("qwen3.5-9b-tiny")))
    assert "causal-conv1d" in " ".join(assumed(Recipe("lfm2-1.2b-tiny")))
    assert not assumed(Recipe("llama-3-8b-tiny"))


def test_families_that_overflow_in_fp16_are_named():
    for precision, overflows in (("fp16-amp", True), ("bf16-amp", False)):
        texts = " ".join(assumed(Recipe("gemma-3-1b-tiny", precision=precision)))
        assert ("exceed" in texts) == overflows
    assert not assumed(Recipe("gpt2-tiny", precision="fp16-amp"))
