"""Recipes: values that check themselves."""

import json

import pytest
from helpers import refused
from transformers import ModernBertDecoderConfig

from memlab import Recipe, Serving

NF4 = {"lora_rank": 2, "base": "nf4", "precision": "fp16"}
ZERO3 = {"ranks": 4, "sharding": "zero3"}
OFFLOADED = {
    "optimizer_offload": "gradients",
    "optimizer": "adamw_torch_fused",
    "precision": "bf16",
}
INSIDE, CHUNKED, PACKED = {"step_in_backward": True}, {"loss": "chunked"}, {"packed": True}


def test_defaults_are_named_in_the_dictionary():
    recipe = Recipe()
    assert recipe.task == "sequence-classification"
    assert json.loads(json.dumps(recipe.as_dict()))["checkpointing"] == "none"


QLORA = NF4 | {"checkpointing": True, "double_quant": True, "optimizer": "paged_adamw_8bit"}


@pytest.mark.parametrize(
    "asked",
    [
        Recipe("gpt2", batch_size=8, lora_rank=4, lora_targets="c_attn,c_proj"),
        Recipe("bert-large", task="masked-lm", freeze=("embeddings", 2), padded=True),
        Recipe("gpt2", set_to_none=False, max_grad_norm=0.5),
        Recipe("llama-3.2-1b", **QLORA, compute_dtype="bf16", upcast=False),
        Serving("gpt2"),
        Serving("t5-3b", weights="bf16", new_tokens=3, batch_size=9, cache="none"),
        Serving("gpt2", weights="nf4", compute_dtype="fp32", all_logits=True),
    ],
)
def test_the_text_of_a_recipe_is_python(asked):
    assert eval(str(asked)) == asked


def test_another_model_takes_its_own_usual_task():
    assert Recipe().but(model="gpt2").task == "causal-lm"


def test_checkpointing_by_yes_and_no():
    assert Recipe(checkpointing=True).checkpointing == "non-reentrant"
    assert Recipe(checkpointing=False) == Recipe()


@pytest.mark.parametrize("freeze", ["embeddings,2", "embeddings, 2", ("embeddings", 2)])
def test_frozen_parts_have_one_form(freeze):
    assert Recipe(freeze=freeze).freeze == ("embeddings", 2)
    assert json.loads(json.dumps(Recipe(freeze=freeze).as_dict()))["freeze"] == ["embeddings", 2]


def test_the_twin_keeps_everything_but_the_size():
    twin = Recipe(model="bert-large", batch_size=4, accumulation=3).twin()
    assert (twin.model, twin.seq_len) == ("bert-large-tiny", 128)
    assert (twin.batch_size, twin.accumulation) == (4, 3)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.5}, 10240),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_sequences_may_be_as_long_as_stretched_positions(scaling, longest):
    """Words of a config.json: 4,096 positions and a way to stretch them, or none."""
    model = {"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": scaling}
    assert Recipe(model, seq_len=longest).seq_len == longest
    with refused(f"from 1 to {longest}"):
        Recipe(model, seq_len=longest + 1)


def test_llama_3_1_has_its_scaling_in_its_maximum():
    assert Recipe("llama-3.1-8b", seq_len=131_072)
    with refused("from 1 to 131072"):
        Recipe("llama-3.1-8b", seq_len=131_073)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("model", "bert-huge", "bert-large"),
        ("task", "translation", "causal-lm"),
        ("batch_size", 0, "from 1"),
        ("batch_size", True, "from 1"),
        ("seq_len", 513, "512"),
        ("precision", "fp8", "bf16-amp"),
        ("optimizer", "adamw", "adamw_torch_fused"),
        ("checkpointing", "sometimes", "reentrant"),
        ("set_to_none", "yes", "True"),
        ("max_grad_norm", float("inf"), "from 0"),
        ("freeze", "-1", "embeddings"),
        ("lora_rank", 1.5, "from 0"),
        ("lora_dropout", 1.0, "below 1"),
        ("lora_targets", (3,), "all-linear"),
    ],
)
def test_bad_values_are_told_in_one_line(field, value, allowed):
    shown = value[0] if isinstance(value, tuple) and value else value
    with refused(str(shown), allowed):
        Recipe(**{field: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compute_dtype": "bf16"}, "compute_dtype is 'bf16' and base is 'none': it has no effect"),
        ({"double_quant": True}, "double_quant is True and base is 'none'"),
        ({"upcast": False}, "upcast is False and base is 'none'"),
        ({"lora_rank": 2, "base": "int8", "double_quant": True}, "allowed is False, or a base of"),
        ({"lora_targets": "c_attn"}, "lora_targets is ('c_attn',) and lora_rank is 0"),
        ({"lora_fp32": False}, "lora_fp32 is False and lora_rank is 0"),
        ({"base": "half"}, "base is 'half' and lora_rank is 0"),
        ({"lora_rank": 2, "base": "half"}, "precision is 'fp32': without autocast the base has"),
        (
            {"lora_rank": 2, "base": "half", "precision": "bf16-amp", "upcast": False},
            "upcast is False and base is 'half'",
        ),
        ({"base": "int3"}, "base is 'int3': allowed are none, half, nf4, fp4, int8"),
        ({"base": "nf4"}, "base is 'nf4' and lora_rank is 0"),
        (NF4 | {"compute_dtype": "int8"}, "compute_dtype is 'int8': allowed are fp32, fp16, bf16"),
        # Ranks.
        ({"sharding": "zero3"}, "ranks is 1: one rank has nothing to split"),
        ({"ranks": 4, "sharding": "zero4"}, "sharding is 'zero4': allowed are ddp, zero1, zero2"),
        (ZERO3 | {"optimizer": "adamw_8bit"}, "optimizer is 'adamw_8bit' and sharding is 'zero3'"),
        (ZERO3 | NF4 | {"base": "int8"}, "base is 'int8' and sharding is 'zero3'"),
        (ZERO3 | NF4 | {"base": "int8", "sharding": "zero2"}, "base is 'int8' and sharding is"),
        ({"ranks": 8, "replicas": 2}, "sharding is 'ddp'"),
        (ZERO3 | {"ranks": 8, "replicas": 3}, "replicas is 3 and ranks is 8"),
        (ZERO3 | {"ranks": 8, "replicas": 8}, "at least two"),
        # What torchao does not train from the host.
        (OFFLOADED | {"optimizer": "adafactor"}, "optimizer_offload is 'gradients' and"),
        (OFFLOADED | {"max_grad_norm": 1.0}, "optimizer_offload is 'gradients' and"),
        (OFFLOADED | {"precision": "fp16-amp"}, "optimizer_offload is 'gradients' and"),
        (OFFLOADED | {"accumulation": 2}, "optimizer_offload is 'gradients' and"),
        ({"activation_offload": True}, "checkpointing non-reentrant"),
        ({"activation_offload": True, "checkpointing": "reentrant"}, "checkpointing non-reentrant"),
        # What needs all gradients.
        (INSIDE | {"accumulation": 2}, "step_in_backward is True and accumulation is 2: "),
        (INSIDE | {"max_grad_norm": 1.0}, "step_in_backward is True and max_grad_norm is 1.0: "),
        (INSIDE | {"precision": "fp16-amp"}, "step_in_backward is True and precision is 'fp16-a"),
        (INSIDE | {"ranks": 2}, "step_in_backward is True and ranks is 2: "),
        (INSIDE | {"set_to_none": False}, "step_in_backward is True and set_to_none is False: "),
        # Losses in parts.
        (CHUNKED | {"model": "bert-large"}, "loss is 'chunked' and task is 'sequence-classific"),
        (CHUNKED | {"model": "gemma-2-2b"}, "its logits are changed after the product"),
        (CHUNKED | {"model": ModernBertDecoderConfig()}, "does not get the last hidden states"),
        ({"loss": "fused"}, "allowed are whole, chunked, linear"),
        # Texts that share a row.
        (PACKED | {"model": "bert-large-tiny"}, "task is 'sequence-classification'"),
        (PACKED | {"padded": True}, "padded is True"),
        (PACKED | {"model": {"model_type": "bloom"}}, "bloom takes no position_ids"),
        (
            PACKED | {"model": {"model_type": "falcon_h1", "num_hidden_layers": 2}},
            "from one text of a row to",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, said):
    with refused(said):
        Recipe(**{"model": "gpt2-tiny", "seq_len": 16} | changes)


def test_layers_of_8_bits_may_have_their_states_split():
    assert Recipe("gpt2-tiny", seq_len=16, **NF4 | {"base": "int8"}, ranks=2, sharding="zero1")


def test_what_a_change_leaves_without_effect_goes_with_it():
    full = Recipe("gpt2-tiny", seq_len=16)
    lora = full.but(lora_rank=2, lora_targets="c_attn", lora_dropout=0.1)
    quantized = lora.but(base="nf4", double_quant=True, upcast=False)
    assert quantized.but(base="none") == lora
    eight = quantized.but(base="int8")
    assert (eight.double_quant, eight.upcast) == (False, False)
    assert lora.but(lora_rank=0) == full
    with refused("double_quant"):
        quantized.but(base="none", double_quant=True)


def test_an_unknown_field_is_told():
    with refused("no field 'batch': allowed are model"):
        Recipe().but(batch=1)


def test_training_arguments_say_the_same(tmp_path):
    recipe = Recipe(
        batch_size=2,
        accumulation=3,
        precision="bf16-amp",
        optimizer="adamw_torch_fused",
        checkpointing="reentrant",
    )
    arguments = recipe.training_arguments(str(tmp_path), use_cpu=True)
    assert arguments.per_device_train_batch_size == 2
    assert arguments.gradient_accumulation_steps == 3
    assert arguments.bf16 and not arguments.fp16
    assert arguments.max_grad_norm == 0
    assert arguments.optim == "adamw_torch_fused"
    assert arguments.activation_checkpointing_kwargs == {"use_reentrant": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw_torch_loop"},
        {"loss": "chunked"},
        {"step_in_backward": True},
        {"optimizer_offload": "states", "optimizer": "adamw_torch_fused"},
    ],
)
def test_what_the_trainer_cannot_do_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Recipe("gpt2-tiny", seq_len=16, **changes).training_arguments()
