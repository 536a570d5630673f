"""Families of models: every one is answered for, or refused in one line; nothing is endless."""

import pytest
from helpers import SMALL, refused
from transformers import CONFIG_MAPPING

from memlab import Recipe, models, plan, simulate

HEADS = SMALL | {"head_dim": 16}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SHARED = MOE | {"shared_expert_intermediate_size": 32}
ROUTED = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
GROUPS = ROUTED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
PATTERN = ["sliding_attention", "full_attention"]
MAMBA = {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
ENCODER = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
ENCODER |= {"num_hidden_layers": 2, "vocab_size": 128}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
BOTH = {
    f"{end}_{name}": n
    for end in ("encoder", "decoder")
    for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
}
BOTH |= {"d_model": 64, "vocab_size": 128, "pad_token_id": 0}

FAMILIES = {
    "llama": HEADS,
    "qwen2": SMALL,
    "qwen3": HEADS,
    "qwen2_moe": SMALL | SHARED,
    "qwen3_moe": HEADS | MOE,
    "qwen3_next": HEADS | SHARED | LINEAR,
    "qwen3_5": {"text_config": HEADS | LINEAR, "vision_config": QWEN_VISION},
    "qwen3_5_moe": {"text_config": HEADS | LINEAR | SHARED, "vision_config": QWEN_VISION},
    "gemma2": HEADS,
    "gemma3_text": HEADS,
    "gemma3": {"text_config": HEADS, "vision_config": VISION},
    "gemma3n": {
        "text_config": HEADS
        | PER_LAYER
        | {
            "num_hidden_layers": 4,
            "intermediate_size": [128] * 4,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": PATTERN * 2,
        }
    },
    "gemma4": {
        "text_config": HEADS
        | PER_LAYER
        | {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "max_position_embeddings": 512,
            "layer_types": PATTERN * 2,
        }
    },
    "llama4": {
        "text_config": HEADS | {"intermediate_size_mlp": 128, "num_local_experts": 4},
        "vision_config": VISION,
    },
    "mistral": HEADS,
    "ministral3": HEADS,
    "mistral3": {
        "text_config": HEADS | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral"},
    },
    "mixtral": SMALL | LOCAL,
    "gpt_oss": HEADS | LOCAL,
    "deepseek_v2": SMALL | GROUPS | LATENT | {"q_lora_rank": 24},
    "deepseek_v3": SMALL | GROUPS | LATENT | {"q_lora_rank": 24},
    "deepseek_v4": HEADS | ROUTED | {"q_lora_rank": 24, "o_lora_rank": 16},
    "glm4": HEADS,
    "glm4_moe": HEADS | GROUPS,
    "minimax_m2": HEADS | LOCAL,
    "phi3": SMALL,
    "phimoe": SMALL | LOCAL,
    "olmo2": SMALL,
    "olmo3": SMALL,
    "olmoe": SMALL | MOE,
    "smollm3": SMALL,
    "cohere2": SMALL,
    "granite": SMALL,
    "granitemoehybrid": SMALL
    | LOCAL
    | MAMBA
    | {
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_expand": 2,
        "layer_types": ["mamba", "attention"],
    },
    "falcon_h1": HEADS | MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_chunk_size": 32},
    "mamba2": {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16}
    | {"state_size": 16, "n_groups": 1, "vocab_size": 128},
    "lfm2": SMALL | {"full_attn_idxs": [1]},
    "kimi_linear": SMALL
    | MOE
    | LATENT
    | {"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4},
    "exaone4": SMALL,
    "bert": ENCODER,
    "electra": ENCODER | {"embedding_size": 32},
    "albert": ENCODER | {"embedding_size": 32},
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "vocab_size": 128},
    "t5": T5,
    "mt5": T5,
    "bart": BOTH,
    "whisper": BOTH,
    "opt": ENCODER | {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
}
WAYS = {
    "full": {"precision": "bf16-amp"},
    "lora": {"precision": "bf16", "lora_rank": 4},
    "qlora": {"precision": "bf16-amp", "lora_rank": 4, "base": "nf4", "double_quant": True},
}
# What is refused, in a part of the words; of a family alone, or of a way of training it.
REFUSED = {
    "whisper": "has none of the tasks",
    "gemma3n qlora": "does not train so (modeling_gemma3n.py:",  # it clamps its packed weights
    "xlnet lora": "does not train so (",  # a product of bf16 and of the adapters' fp32
    **{
        f"{family} {way}": reason
        for family, reason in (
            ("llama4", "router of llama4 does not compute as a linear layer"),
            ("phimoe", "router of phimoe does not compute as a linear layer"),
            ("deepseek_v4", "o_a_proj of deepseek_v4 does not compute as a linear layer"),
            ("falcon_h1", "Module 'out_proj' is incompatible"),
            ("mamba2", "Module 'out_proj' is incompatible"),
        )
        for way in ("lora", "qlora")
    },
}
EAGER = ("gemma2", "gpt_oss", "deepseek_v4", "mamba2", "xlnet", "bloom")


def small(family):
    return CONFIG_MAPPING[family](**FAMILIES[family])


EVERY = [(family, way) for family in FAMILIES for way in WAYS]
# Its linear attention goes through each of 64 rows in Python, which takes seconds.
EVERY = [(family, way) for family, way in EVERY if family != "kimi_linear" or way == "lora"]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("family", "way"), EVERY)
def test_a_family_is_answered_for_or_refused_in_one_line(family, way):
    attention = "eager" if family in EAGER else "sdpa"
    asked = {"model": small(family), "batch_size": 1, "seq_len": 32, "attention": attention}
    words = REFUSED.get(family) or REFUSED.get(f"{family} {way}")
    if words is None:
        footprint = simulate(Recipe(**asked, **WAYS[way]), "A100-40GB")
        assert footprint.peak_allocated > 4 * footprint.trainable_parameters
        return
    with refused(words):
        simulate(Recipe(**asked, **WAYS[way]), "A100-40GB")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ways", "left_out"),
    [
        ("granitemoehybrid", "lora", None),
        ("mamba2", "full,lora", "'out_proj' is incompatible"),
    ],
)
def test_where_adapters_are_refused_a_plan_answers_for_the_rest(family, ways, left_out):
    asked = {"seq_len": 32, "effective_batch": 1, "lora_rank": 2, "precisions": "fp32"}
    answer = plan(small(family), "1 GiB", ways=ways, **asked)  # so that few sizes are tried
    assert answer.fastest
    left = "lora" if left_out is None else "full"
    assert {option.way for option in answer.tiers.values()} == {left}
    assert left_out is None or left_out in str(answer)


@pytest.mark.parametrize("model", ["mixtral-8x7b-tiny", "qwen3-30b-a3b-tiny", "gpt-oss-20b-tiny"])
def test_a_step_of_a_mixture_computes_with_its_active_parameters(model):
    """6 operations a token and parameter, but for the embedding: 2 forward, 4 backward."""
    config = models.config(model)
    active = models.active_parameters(config)[1] - config.vocab_size * config.hidden_size
    step = simulate(Recipe(model, batch_size=2, seq_len=64), "A100-40GB").step_seconds
    assert 0.95 < step.flops / (6 * active * 2 * 64) < 1.2
