"""Accelerate's examples/nlp_example.py (github.com/huggingface/accelerate, Apache-2.0), anew."""

import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import assert_as_simulated
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup, set_seed

from memlab import Recipe, SimulatedGPU, models
from memlab.book.corpora import tokenizer

WORDS = "the old clock in the hall told every hour to the cat that slept below it".split()
BATCH = 8


def pairs(number):
    """Pairs of sentences of 3 to 40 words, and whether they say the same."""
    source = random.Random(0)

    def sentence():
        return " ".join(source.choices(WORDS, k=source.randint(3, 40)))

    return [
        {"sentence1": sentence(), "sentence2": sentence(), "label": i % 2} for i in range(number)
    ]


def train(precision, accumulation=1):
    """The example's training_function; which texts were told right, the widths of its batches."""
    accelerator = Accelerator(mixed_precision=precision)
    set_seed(42)
    words = tokenizer([" ".join(WORDS)], vocab_size=512)

    def collate(examples):
        batch = words(
            [example["sentence1"] for example in examples],
            [example["sentence2"] for example in examples],
            padding="longest",
            truncation=True,
            max_length=128,
            pad_to_multiple_of=8 if accelerator.mixed_precision != "no" else None,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor([example["label"] for example in examples])
        return batch

    with accelerator.main_process_first():
        examples = pairs(48)
    loader = DataLoader(examples[:32], BATCH, shuffle=True, collate_fn=collate, drop_last=True)
    evaluation = DataLoader(examples[32:], 6, shuffle=False, collate_fn=collate)
    model = models.build("bert-base-tiny", attention="sdpa").to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=2e-5)
    scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=2, num_training_steps=len(loader) // accumulation
    )
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    hits, widths = [], []
    for epoch in range(2):
        model.train()
        for step, batch in enumerate(loader):
            batch.to(accelerator.device)
            widths.append(batch["input_ids"].shape[1])
            outputs = model(**batch)
            loss = outputs.loss / accumulation
            accelerator.backward(loss)
            if step % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        for batch in evaluation:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            hits += np.equal(predictions.cpu(), references.cpu()).tolist()
        accelerator.print(f"epoch {epoch}:", np.mean(hits))
    return hits, widths


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("precision", "name"), [("no", "fp32"), ("fp16", "fp16-amp"), ("bf16", "bf16-amp")]
)
def test_it_holds_what_the_recipe_of_its_widest_batch_holds(precision, name):
    with SimulatedGPU("A100-40GB") as gpu:
        hits, widths = train(precision)
    assert len(hits) == 2 * 16
    assert len(set(widths)) > 1 or precision != "no"
    recipe = Recipe(
        "bert-base-tiny",
        batch_size=BATCH,
        seq_len=max(widths),
        precision=name,
        padded=True,
        attention="sdpa",
    )
    assert_as_simulated(gpu.footprint, recipe, "A100-40GB")  # a token in every row is 140 KB
