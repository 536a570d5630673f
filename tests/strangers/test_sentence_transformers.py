"""sentence-transformers' training overview, written anew.

github.com/huggingface/sentence-transformers, docs/sentence_transformer (Apache-2.0)
"""

from datasets import Dataset
from helpers import assert_as_on_the_cpu, on_the_cpu
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses, modules
from transformers import AutoModel

from memlab import SimulatedGPU, models
from memlab.book.corpora import tokenizer
from memlab.card.kernels.rules import RULES

TEXTS = ["the cat sat on the mat " * (1 + i % 12) for i in range(64)]


def train(folder, device):
    word = modules.Transformer(str(folder / "model"))
    model = SentenceTransformer(
        modules=[word, modules.Pooling(word.get_embedding_dimension())], device=device
    )
    data = Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]})
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=16,
            num_train_epochs=1,
            report_to=[],
            use_cpu=device == "cpu",
            save_strategy="no",
            disable_tqdm=True,
            optim="adamw_torch_fused",
        ),
        train_dataset=data,
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    model.save_pretrained(str(folder / "trained"))
    return model.encode(TEXTS[:4]).shape


def test_it_holds_what_the_same_loop_holds_on_a_real_cpu(tmp_path):
    config = models.config("bert-base-tiny")  # a CPU's dropout keeps more
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    AutoModel.from_config(config, attn_implementation="eager").save_pretrained(tmp_path / "model")
    tokenizer(TEXTS, vocab_size=512).save_pretrained(tmp_path / "model")
    cpu, shape = on_the_cpu(lambda: train(tmp_path, "cpu"))
    # A CPU keeps no buffers for its sums.
    with SimulatedGPU("T4", rules=frozenset(RULES) - {"sums of rows"}) as gpu:
        assert train(tmp_path, "cuda") == shape
    # A token more in every row would be 300 KB.
    assert_as_on_the_cpu(gpu.footprint, cpu, small=2**17)
