"""The notebook of peft and bitsandbytes that finetunes a 4-bit base, written anew.

github.com/artidoro/qlora (MIT) and github.com/huggingface/peft (Apache-2.0)
"""

import pytest
import torch
from datasets import Dataset
from helpers import assert_as_simulated
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from memlab import Recipe, SimulatedGPU, models
from memlab.book.corpora import tokenizer

QUOTES = ["the cat sat on the mat and looked at the rain " * 6] * 32


def finetune(folder, checkpointing):
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        device_map={"": 0},
    )
    words = AutoTokenizer.from_pretrained(folder)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    model = get_peft_model(
        model,
        LoraConfig(
            r=64,
            lora_alpha=32,
            lora_dropout=0.05,
            bias="none",
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "v_proj"],
        ),
    )
    data = Dataset.from_dict({"quote": QUOTES})
    data = data.map(lambda rows: words(rows["quote"]), batched=True)
    trainer = Trainer(
        model=model,
        train_dataset=data,
        args=TrainingArguments(
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            warmup_steps=2,
            max_steps=3,
            learning_rate=2e-4,
            bf16=True,
            logging_steps=1,
            output_dir=folder / "outputs",
            optim="paged_adamw_8bit",
            report_to=[],
            disable_tqdm=True,
        ),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    model.config.use_cache = False
    trainer.train()
    model.save_pretrained(folder / "adapter")
    return model, len(data[0]["input_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_holds_what_the_recipe_holds(tmp_path, checkpointing):
    models.build("llama-3-8b-tiny").save_pretrained(tmp_path)
    tokenizer(QUOTES, vocab_size=512, kind="bpe").save_pretrained(tmp_path)
    with SimulatedGPU("A100-40GB") as gpu:
        model, width = finetune(tmp_path, checkpointing)
    recipe = Recipe(
        "llama-3-8b-tiny",
        batch_size=2,
        seq_len=width,
        accumulation=4,
        precision="bf16-amp",
        optimizer="paged_adamw_8bit",
        lora_rank=64,
        lora_targets="q_proj,v_proj",
        lora_dropout=0.05,
        base="nf4",
        double_quant=True,
        attention="sdpa",
        compute_dtype="bf16",
        checkpointing="reentrant" if checkpointing else "none",
    )
    # The Trainer fetches all batches of a step at once, each with its mask.
    batches = 4 * 3 * 2 * width * 8
    assert_as_simulated(gpu.footprint, recipe, "A100-40GB", small=batches)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 212992
