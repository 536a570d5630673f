"""TRL's trainers as its documentation has them (github.com/huggingface/trl, Apache-2.0), anew."""

import importlib.util

import pytest
import torch
from datasets import Dataset
from helpers import assert_as_on_the_cpu, on_the_cpu
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from memlab import Recipe, SimulatedGPU, models, simulate
from memlab.book.corpora import tokenizer

SENTENCE = "the cat sat on the mat and looked at the rain"
TEXTS = [" ".join([SENTENCE] * (1 + i % 7)) for i in range(48)]
CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' : ' }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def words():
    words = tokenizer(TEXTS, vocab_size=512, kind="bpe")
    words.chat_template = CHAT
    return words


@pytest.fixture
def folder(tmp_path):
    models.build("llama-3-8b-tiny").save_pretrained(tmp_path / "model")
    return tmp_path


def settings(folder, **more):
    common = dict(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-4,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=False,
    )
    return common | more


def sft(folder, words, data, model=None, peft_config=None, **more):
    trainer = SFTTrainer(
        model=model or str(folder / "model"),
        args=SFTConfig(**settings(folder, **({"max_length": 128} | more))),
        train_dataset=data,
        processing_class=words,
        peft_config=peft_config,
    )
    seen = []
    inner = trainer.data_collator

    def collate(examples):
        batch = inner(examples)
        seen.append({name: getattr(value, "shape", value) for name, value in batch.items()})
        seen[-1]["trained"] = int((batch["labels"] != -100).sum())
        return batch

    trainer.data_collator = collate
    trainer.train()
    return seen


def text():
    return Dataset.from_dict({"text": TEXTS})


EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}, "optim": "adamw_torch_fused"}
CONVERSATIONS = [
    [{"role": "user", "content": SENTENCE}, {"role": "assistant", "content": text}]
    for text in TEXTS
]


def assert_as_really_run(train):
    """`train(**settings)` on the card and for real; gives the batches of both.

    Where Triton is installed, TRL takes kernels of its own on a card and not on a CPU.
    """
    with SimulatedGPU("A100-40GB") as gpu:
        batches = train(**EAGER)
    cpu, really = on_the_cpu(lambda: train(use_cpu=True, **EAGER))
    assert batches == really
    if importlib.util.find_spec("triton") is None:
        assert_as_on_the_cpu(gpu.footprint, cpu, small=32768)
    return batches


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"packing": True},
        {"packing": True, "packing_strategy": "wrapped"},
        {"padding_free": True, "max_length": None},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_supervised_finetuning(folder, words, how):
    batches = assert_as_really_run(lambda **more: sft(folder, words, text(), **how, **more))
    rows, width = batches[0]["input_ids"]
    if how.get("packing_strategy"):
        assert (rows, width) == (2, 128)
    elif "packing" in how:
        assert rows == 1 and 128 < width <= 256 and batches[0]["position_ids"] == (1, width)
    elif "padding_free" in how:
        assert rows == 1 and batches[0]["position_ids"] == (1, width)
    else:
        assert rows == 2 and len({batch["input_ids"] for batch in batches}) > 1


@pytest.mark.slow
def test_only_the_assistants_tokens_are_trained(folder, words):
    data = Dataset.from_dict({"messages": CONVERSATIONS})
    some = assert_as_really_run(
        lambda **more: sft(folder, words, data, assistant_only_loss=True, **more)
    )
    with SimulatedGPU("A100-40GB"):
        every = sft(folder, words, data, **EAGER)
    for batch, other in zip(some, every, strict=True):
        assert batch["input_ids"] == other["input_ids"]
        assert 0 < batch["trained"] < other["trained"]


@pytest.mark.slow
def test_supervised_finetuning_of_a_quantized_base(folder, words):
    def run(**how):
        with SimulatedGPU("A100-40GB") as gpu:
            model = AutoModelForCausalLM.from_pretrained(
                folder / "model", device_map="auto", dtype=torch.bfloat16, **how
            )
            adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
            sft(folder, words, text(), model, adapters, bf16=True, optim="adamw_torch_fused")
        return gpu.footprint.breakdown

    whole = run()
    found = run(
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    )
    recipe = Recipe(
        "llama-3-8b-tiny",
        base="nf4",
        lora_rank=8,
        lora_fp32=False,  # TRL casts the adapters of a quantized base
        upcast=False,
        precision="bf16",
        optimizer="adamw_torch_fused",
    )
    simulated = simulate(recipe, "A100-40GB").breakdown
    assert found["parameters"] == simulated["parameters"]
    assert found["optimizer_states"] == simulated["optimizer_states"]
    assert found["temporary"] == whole["temporary"]  # of the head, in chunks of its own


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_direct_preference_optimization(folder, words, lora):
    data = Dataset.from_dict(
        {
            "prompt": TEXTS,
            "chosen": [" the cat looked"] * len(TEXTS),
            "rejected": [" rain on the mat and the cat"] * len(TEXTS),
        }
    )

    def train(**more):
        trainer = DPOTrainer(
            model=str(folder / "model"),
            args=DPOConfig(**settings(folder, max_length=128, **more)),
            train_dataset=data,
            processing_class=words,
            peft_config=LoraConfig(r=8, task_type="CAUSAL_LM") if lora else None,
        )
        trainer.train()
        return trainer.state.global_step

    assert_as_really_run(train)
