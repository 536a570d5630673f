"""The grid of runs that `memlab record` makes: fixed, so that records of cards can be compared."""

import dataclasses

from memlab.evidence.records import find_records
from memlab.recipe import Recipe

# A row: model, micro-batch x length, and what differs from Recipe's defaults (fp32, eager,
# adamw_torch, nothing frozen). The rows that say most come first, for a card that is lent for
# minutes; the others are ordered by model. Another row is another line: names of a precision, an
# attention or an optimizer stand alone, other fields as field=value.
ROWS = """
bert-large 8x512
llama-3.2-1b 1x1024 bf16 sdpa
gpt2 4x1024 bf16-amp sdpa adamw_torch_fused
llama-3-8b 1x2048 bf16 sdpa adamw_torch_fused lora_rank=16 checkpointing
bert-large 8x512 fp16-amp sdpa
gpt2-xl 1x1024 adafactor checkpointing
distilbert 32x128
qwen2.5-0.5b 2x1024 bf16-amp
llama-3.2-3b 1x2048 bf16 sdpa adamw_8bit checkpointing
bert-base 16x512 bf16-amp sdpa freeze=embeddings,6

distilbert 16x512 bf16 sdpa adamw_torch_fused
distilbert 32x128 fp16-amp sgd
bert-base 32x128 freeze=backbone
bert-base 16x512 fp16-amp
bert-base 8x512 adafactor
bert-base 8x512 adamw_8bit
bert-base 8x512 sdpa task=masked-lm
bert-base 8x512 lora_rank=8 lora_dropout=0.1
bert-large 4x512 sgd
bert-large 4x512 bf16 sdpa lion_8bit
bert-large 8x512 bf16-amp sdpa checkpointing
bert-large 4x512 fp16-amp lora_rank=16
bert-large 16x128 adamw_torch_fused
bert-large 2x512 sdpa accumulation=4
roberta-base 16x256 bf16-amp sdpa
roberta-base 8x512 checkpointing
deberta-v3-base 4x512
deberta-v3-base 8x256 bf16-amp checkpointing adamw_torch_fused
t5-3b 1x512 bf16 adafactor checkpointing

gpt2 4x1024
gpt2 4x1024 sdpa
gpt2 8x512 fp16-amp
gpt2 8x1024 bf16 sdpa checkpointing
gpt2 4x1024 sdpa freeze=embeddings,8
gpt2 2x1024 accumulation=4 adamw_torch_loop
gpt2-medium 2x1024 sdpa adamw_8bit
gpt2-medium 4x1024 bf16-amp sdpa checkpointing
gpt2-large 1x1024 sgd
gpt2-large 2x512 bf16 sdpa
gpt2-xl 1x1024 bf16 sdpa adamw_torch_fused
gpt2-xl 1x1024 fp16-amp sdpa checkpointing
qwen2.5-0.5b 4x512 sdpa
qwen2.5-0.5b 4x1024 fp16-amp sdpa lora_rank=16
qwen2.5-0.5b 1x4096 bf16-amp sdpa checkpointing
qwen2.5-1.5b 2x1024 bf16 sdpa
qwen2.5-1.5b 1x2048 bf16 eager lora_rank=64
llama-3.2-1b 2x512 sdpa
llama-3.2-1b 1x1024 bf16
llama-3.2-1b 4x128 bf16 sdpa sgd
llama-3.2-1b 1x8192 bf16 sdpa checkpointing
llama-3.2-1b 1x2048 bf16-amp sdpa checkpointing
llama-3.2-1b 1x2048 bf16 sdpa lora_rank=16 lora_targets=q_proj,v_proj
llama-3.2-1b 1x2048 bf16 sdpa paged_adamw_8bit
llama-3.2-3b 1x1024 bf16 sdpa freeze=embeddings,14
llama-3.2-3b 1x1024 adafactor sdpa checkpointing
llama-3.2-3b 2x2048 bf16 sdpa lora_rank=16 lora_dropout=0.05
mistral-7b 1x1024 bf16 sdpa lora_rank=8 checkpointing
mistral-7b 1x4096 bf16 sdpa lora_rank=16 lora_dropout=0.05 checkpointing
qwen2.5-7b 1x2048 bf16 sdpa lora_rank=16
llama-2-7b 1x512 bf16 lora_rank=16 lora_half
llama-2-7b 1x1024 bf16 sdpa lion_8bit checkpointing
llama-3-8b 1x8192 bf16 sdpa lora_rank=16 checkpointing
llama-3-8b 1x1024 bf16 sdpa checkpointing
llama-3-8b 1x512 bf16 sdpa adafactor
llama-3-8b 1x2048 bf16 sdpa freeze=backbone
llama-3-8b 1x512 sdpa adamw_torch checkpointing

llama-3.2-1b 2x512 fp16-amp sdpa lora_rank=16 base=nf4
llama-3.2-3b 1x1024 bf16 eager lora_rank=16 base=fp4 no_upcast
qwen2.5-7b 1x1024 bf16-amp sdpa lora_rank=16 base=int8 checkpointing
mistral-7b 2x512 bf16 sdpa lora_rank=64 base=nf4 double_quant no_upcast
llama-3-8b 1x2048 bf16-amp sdpa lora_rank=16 base=nf4 checkpointing paged_adamw_8bit
llama-3-8b 4x512 bf16-amp sdpa lora_rank=16 lora_dropout=0.05 base=nf4 double_quant checkpointing
"""


def grid_runs(tiny: bool = False) -> dict[str, Recipe]:
    """Name -> recipe of every run, in the order of running.

    tiny: the same runs on the models' tiny twins, sequences cut to a sixteenth (32 tokens at
        least) and one layer of two frozen, for machines without a GPU.
    """
    runs = {" ".join(line.split()): _recipe(line) for line in ROWS.splitlines() if line}
    nine = {f"published: {run.name}": Recipe(**run.recipe) for run in find_records("published")}
    first = dict(list(runs.items())[:10])
    runs = first | nine | runs
    if tiny:
        return {name: _twin(recipe) for name, recipe in runs.items()}
    return runs


def _twin(recipe: Recipe) -> Recipe:
    frozen = tuple(min(part, 1) if isinstance(part, int) else part for part in recipe.freeze)
    return recipe.twin(seq_len=max(32, recipe.seq_len // 16), freeze=frozen)


def _recipe(line: str) -> Recipe:
    model, size, *words = line.split()
    batch, length = size.split("x")
    fields = {"model": model, "batch_size": int(batch), "seq_len": int(length)}
    for word in words:
        if word in WORDS:
            name, value = WORDS[word]
        else:
            name, value = word.split("=")
            value = int(value) if value.isdigit() else value
            value = float(value) if name == "lora_dropout" else value
        fields[name] = value
    return Recipe(**fields)


def _words() -> dict[str, tuple[str, object]]:
    """word -> (field, value) of every choice and switch; of two alike the first field's."""
    words = {}
    for field in reversed(dataclasses.fields(Recipe)):
        if isinstance(field.default, bool):
            name = field.metadata["off"][0] if field.default else field.name
            words[name] = field.name, not field.default
        else:
            choices = filter(None, field.metadata["choices"])
            words |= {str(choice): (field.name, choice) for choice in choices}
    return words | {"checkpointing": ("checkpointing", True)}


WORDS = _words()


def select(runs: dict[str, Recipe], only: str) -> dict[str, Recipe]:
    """The runs whose name holds every word of `only`. Raises ValueError if none does."""
    found = {n: r for n, r in runs.items() if all(w in n.split() for w in only.split())}
    if not found:
        words = sorted({word for name in runs for word in name.split()})
        raise ValueError(f"no run of the grid has {only!r}: its words are {', '.join(words)}")
    return found
