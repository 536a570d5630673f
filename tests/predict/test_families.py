"""Families of models: every one is answered for, or refused in one line; nothing is endless."""

import pytest
from helpers import refused
from transformers import CONFIG_MAPPING

from memlab import Recipe, models, plan, simulate

# Sizes of a small model of any family: each config takes those that it has.
SIZES = {
    1: "n_group topk_group n_groups first_k_dense_replace mamba_n_groups",
    2: "encoder_layers decoder_layers num_key_value_heads num_experts_per_tok"
    " num_experts_per_token mamba_expand linear_num_key_heads linear_num_value_heads",
    4: "num_attention_heads n_head num_experts n_routed_experts num_local_experts"
    " linear_num_heads encoder_attention_heads decoder_attention_heads",
    8: "qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input laurel_rank num_heads"
    " mamba_n_heads",
    16: "head_dim d_kv d_head v_head_dim qk_head_dim kv_lora_rank q_lora_rank o_lora_rank"
    " state_size linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head"
    " mamba_d_state",
    32: "embedding_size global_head_dim moe_intermediate_size shared_intermediate_size"
    " shared_expert_intermediate_size mamba_chunk_size",
    64: "hidden_size d_model word_embed_proj_dim",
    128: "intermediate_size intermediate_size_mlp d_ff d_inner ffn_dim encoder_ffn_dim"
    " decoder_ffn_dim vocab_size mamba_d_ssm vocab_size_per_layer_input",
}
NAMES = {name: size for size, names in SIZES.items() for name in names.split()}
NAMES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = (
    "llama qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5 qwen3_5_moe gemma2 gemma3_text "
    "gemma3 gemma3n gemma4 llama4 mistral ministral3 mistral3 mixtral gpt_oss deepseek_v2 "
    "deepseek_v3 deepseek_v4 glm4 glm4_moe minimax_m2 phi3 phimoe olmo2 olmo3 olmoe smollm3 "
    "cohere2 granite granitemoehybrid falcon_h1 mamba2 lfm2 kimi_linear exaone4 bert electra "
    "albert xlnet t5 mt5 bart whisper opt bloom"
).split()
# Layers that share keys and values, of both kinds of attention.
SHARING = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
SET = {
    "deepseek_v2": {"num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": {"head_dim": 8},
    "gemma3n": SHARING | {"intermediate_size": [128] * 4},
    "gemma4": SHARING,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
WAYS = {
    "full": {"precision": "bf16-amp"},
    "lora": {"precision": "bf16", "lora_rank": 4},
    "qlora": {"precision": "bf16-amp", "lora_rank": 4, "base": "nf4", "double_quant": True},
}
# What is refused, in a part of the words; of a family alone, or of a way of training it.
REFUSED = {
    "whisper": "has none of the tasks",
    "gemma3n qlora": "cannot be trained so (modeling_gemma3n.py:",  # it clamps its packed weights
    "xlnet lora": "cannot be trained so (",  # a product of bf16 and of the adapters' fp32
    **{
        f"{family} {way}": reason
        for family, reason in (
            ("llama4", "router of llama4_text does not compute as a linear layer"),
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
    own, sizes = SET.get(family, {}), dict(NAMES)
    if family == "gemma4":
        del sizes["head_dim"]  # it has one for each kind of layer
    config = models.resized(CONFIG_MAPPING[family](), **sizes)
    config = models.with_layers(config, len(own.get("layer_types", "ab")))
    vars(config).update(own)
    return config


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
