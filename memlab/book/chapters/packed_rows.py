"""Several texts in one row: whether they see each other, and what a row costs under a mask."""

import importlib.util

import torch
from datasets import Dataset
from torch.nn import functional
from transformers import AttentionInterface, DataCollatorWithFlattening

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.gpus import find_gpu
from memlab.units import MiB

_flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)


def one_row(texts: list[list[int]], device="cpu") -> dict:
    """The texts in one row, with positions and borders, for a model."""
    row = _flatten([{"input_ids": words} for words in texts])
    row.pop("labels")
    return {n: x.to(device) if torch.is_tensor(x) else x for n, x in row.items()}


@torch.no_grad()
def leak(model, texts: list[list[int]], **inputs) -> float:
    """The largest difference of hidden states to those of the same texts alone; 0 is right."""
    model, device = model.base_model, model.device
    together = model(**inputs).last_hidden_state[0]
    kind = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # alone, whatever the row takes
    alone = [model(**one_row([words], device)).last_hidden_state[0] for words in texts]
    model.set_attn_implementation(kind)
    return (together - torch.cat(alone)).abs().max().item()


def leaks(config, texts: list[list[int]], device="cpu") -> dict[str, float]:
    """`leak` of four ways to hand a row to GPT-2, and of one to a BERT of this config."""
    flat = one_row(texts, device)
    ways = {
        "positions, no cache": flat | {"use_cache": False},
        "positions": flat | {"use_cache": True},  # as GPT-2 has it
        "no positions": {"input_ids": flat["input_ids"]},
        "mask of ones": flat | {"attention_mask": torch.ones_like(flat["input_ids"])},
    }
    decoder = models.build("gpt2-tiny", attention="sdpa").eval().to(device)
    encoder = models.build(config, attention="sdpa").eval().to(device)
    found = {f"GPT-2, {name}": leak(decoder, texts, **row) for name, row in ways.items()}
    found["BERT, positions"] = leak(encoder, texts, **flat)
    encoder.set_attn_implementation("text_by_text")
    return found | {"BERT, borders": leak(encoder, texts, **flat)}


def text_by_text(module, query, key, value, mask, **given):
    """Attention within each text of one row, for transformers; no mask, no dropout."""
    borders, longest = given["cu_seq_lens_q"], given["max_length_q"]
    if query.is_cuda and query.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        sees = (-1, 0 if module.is_causal else -1)  # tokens back, ahead
        how = borders, borders, longest, longest
        return varlen_attn(*rows, *how, window_size=sees)[None], None
    sizes = borders.diff().tolist()
    attend = functional.scaled_dot_product_attention
    each = zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True)
    heads = [attend(*text, is_causal=module.is_causal) for text in each]
    return torch.cat(heads, 2).transpose(1, 2), None


AttentionInterface.register("text_by_text", text_by_text)


def blocks(sizes: list[int], device="cpu") -> torch.Tensor:
    """Yes and no for each pair of tokens of a row: whether they are of one text."""
    whose = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)
    return (whose[:, None] == whose)[None, None]


def peak_of(attention: str, inputs: dict) -> float:
    """Peak of two steps of BERT-base on an A100 under bf16 autocast, MiB."""
    with SimulatedGPU(find_gpu("A100-40GB").without_limit()) as gpu:
        model = models.build("bert-base", attention="sdpa").to("cuda")
        model.set_attn_implementation(attention)
        optimizer = torch.optim.AdamW(model.parameters())
        given = {n: x.cpu().to("cuda") if torch.is_tensor(x) else x for n, x in inputs.items()}
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                states = model.base_model(**given).last_hidden_state
            states.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return gpu.footprint.peak_allocated / MiB


def three_ways(texts: list[list[int]], padded: dict) -> dict[str, tuple[float, int]]:
    """Layout -> (peak in MiB, pairs of tokens compared in a layer) of BERT-base on a batch."""
    sizes, row = [len(words) for words in texts], one_row(texts)
    masked = {n: row[n] for n in ("input_ids", "position_ids")}
    masked["attention_mask"] = blocks(sizes)
    return {
        "padded": (peak_of("sdpa", padded), len(sizes) * max(sizes) ** 2),
        "one row, mask": (peak_of("sdpa", masked), sum(sizes) ** 2),
        "one row, borders": (peak_of("text_by_text", row), sum(n**2 for n in sizes)),
    }


def trl_layouts(texts: list[list[int]]) -> dict[str, list[str]]:
    """Way of TRL -> [shape of the ids of its first batch, what tells the texts apart].

    A batch is 16 texts or 2 packed rows of 512. Without TRL it is empty.
    """
    if importlib.util.find_spec("trl") is None:
        return {}
    trl = importlib.import_module("trl")
    collators = importlib.import_module("trl.trainer.sft_trainer")
    data = Dataset.from_dict({"input_ids": texts})
    rows = {
        "neither": (data.select(range(16)), False),
        "padding_free": (data.select(range(16)), True),
        "packing": (trl.pack_dataset(data, 512).select(range(2)), True),
        "packing, wrapped": (trl.pack_dataset(data, 512, "wrapped").select(range(2)), False),
    }
    found = {}
    for name, (some, padding_free) in rows.items():
        collator = collators.DataCollatorForLanguageModeling(
            pad_token_id=0, padding_free=padding_free
        )
        batch = collator(list(some))
        shape = " x ".join(map(str, batch["input_ids"].shape))
        found[name] = [shape, "positions" if "position_ids" in batch else "mask"]
    return found
