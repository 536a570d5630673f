"""transformers' Trainer as its text classification tutorial has it (Apache-2.0), written anew.

github.com/huggingface/transformers, docs/source/en/tasks/sequence_classification.md
"""

import numpy as np
from datasets import Dataset
from helpers import assert_as_simulated
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from memlab import Recipe, SimulatedGPU, models
from memlab.book.corpora import tokenizer

TEXTS = [("good " if i % 2 else "bad ") + "words about a film " * (1 + i % 24) for i in range(64)]
SAVED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")


def run(folder, resume):
    """(scores, the trainer's history, tokens of the longest text, steps) of two epochs."""
    words = tokenizer(TEXTS, vocab_size=512)
    data = Dataset.from_dict({"text": TEXTS, "label": [i % 2 for i in range(64)]})
    data = data.map(lambda examples: words(examples["text"], truncation=True), batched=True)
    data = data.train_test_split(test_size=16, seed=0)
    scores = []

    def compute_metrics(prediction):
        logits, labels = prediction
        assert logits.shape == (16, 2) and logits.dtype == np.float32
        scores.append(float((np.argmax(logits, axis=1) == labels).mean()))
        return {"accuracy": scores[-1]}

    trainer = Trainer(
        model=models.build("bert-base-tiny", attention="sdpa"),
        args=TrainingArguments(
            output_dir=folder,
            learning_rate=2e-5,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            num_train_epochs=2,
            weight_decay=0.01,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
            seed=0,
            fp16=True,
            optim="adamw_torch_fused",
        ),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=words,
        data_collator=DataCollatorWithPadding(tokenizer=words),
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    widest = max(len(ids) for ids in data["train"]["input_ids"])
    return scores, history, widest, trainer.state.global_step


def test_evaluating_saving_and_going_on_change_no_peak(tmp_path):
    footprints = []
    for resume in (None, tmp_path / "checkpoint-6"):
        with SimulatedGPU("T4") as gpu:
            scores, history, widest, steps = run(tmp_path, resume)
        footprints.append(gpu.footprint)
        assert steps == 12
        assert all(0 < score < 1 for score in scores)
        assert [line["eval_accuracy"] for line in history if "eval_loss" in line][-1] == scores[-1]
    assert len(scores) == 1  # it went on after the first epoch
    assert all((tmp_path / "checkpoint-6" / name).stat().st_size for name in SAVED)
    first, second = footprints
    assert (first.peak_allocated, first.breakdown) == (second.peak_allocated, second.breakdown)
    recipe = Recipe(
        "bert-base-tiny",
        batch_size=8,
        seq_len=widest,
        precision="fp16-amp",
        padded=True,
        optimizer="adamw_torch_fused",
        attention="sdpa",
    )
    assert_as_simulated(first, recipe, "T4")
