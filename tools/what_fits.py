"""For every model of the catalogue and seven GPUs: which way to train fits, and what it needs.

    python tools/what_fits.py [file]    complete the file, tests/what_fits.json by default, and
                                        write the table of chapters/what-fits.md

The ways are full fine-tuning, LoRA and QLoRA, with the settings that the planner starts from:
autocast, checkpointing, fused attention, and micro-batches of 1 x 2,048 tokens (or the longest
sequence of the model). The answers are those of `memlab.fits`. A model with shipped traces takes
seconds, any other takes minutes.
"""

import functools
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from memlab import Recipe, find_gpu, models
from memlab.panels.packed_tables import has_traces
from memlab.planner.space import HALF, NF4, attention_of
from memlab.predict.fit import verdict
from memlab.predict.simulate import sized_log

ROOT = Path(__file__).parent.parent
FILE, PAGE = ROOT / "tests" / "what_fits.json", ROOT / "chapters" / "what-fits.md"
CARDS = ("RTX-3060", "T4", "RTX-4090", "RTX-5090", "L40S", "A100-80GB", "B200")
SEQ_LEN = 2048
LORA = {"lora_rank": 16}
WAYS = {"full": {}, "LoRA": LORA | HALF, "QLoRA": LORA | NF4}
# Lower bounds. Full fine-tuning: fp32 weights, gradients and AdamW's two states. LoRA and QLoRA:
# the base model alone.
BYTES_PER_WEIGHT = {"full": 16, "LoRA": 2, "QLoRA": 0.5}
NAMES = [name for name in models.MODELS if not name.endswith("-tiny")]


def recipe_of(model: str, way: str, gpu: str) -> Recipe:
    """The recipe for one way to train a model, in the half precision that the GPU has."""
    half = "bf16-amp" if "bfloat16" in find_gpu(gpu).native_dtypes else "fp16-amp"
    length = min(SEQ_LEN, models.max_length(model) or SEQ_LEN)
    return Recipe(
        model,
        seq_len=length,
        accumulation=16,
        precision=half,
        optimizer="adamw_torch_fused",
        checkpointing=True,
        attention=attention_of(model, None),
        max_grad_norm=1.0,
        **WAYS[way],
    )


def answer(model: str, way: str, gpu: str) -> str:
    """The answer as text: `fits: 12.3 GiB`, `does not fit: 12.3 GiB`, or `refused: ...`.

    A model whose lower bound exceeds the GPU is not simulated: `does not fit: at least 12.3 GiB`.
    """
    card, least = find_gpu(gpu), BYTES_PER_WEIGHT[way] * weights(model)
    if least > card.total_memory:
        return f"does not fit: at least {least / 2**30:.1f} GiB"
    try:
        recipe = recipe_of(model, way, gpu)
        said = verdict(recipe, sized_log(recipe, card), card)
    except ValueError as error:
        return f"refused: {error}"
    return f"{'fits' if said.fits else 'does not fit'}: {said.needed / 2**30:.1f} GiB"


@functools.cache
def weights(model: str) -> int:
    """The number of a model's parameters."""
    with torch.device("meta"):
        return models.build(model).num_parameters()


def is_slow(model: str) -> bool:
    """Whether memlab ships no trace for a model, so that its answers take minutes."""
    return not has_traces(recipe_of(model, "QLoRA", "A100-80GB"), find_gpu("A100-80GB"))


def answers(model: str) -> dict[str, dict[str, str]]:
    """way -> GPU -> answer for one model; on each GPU only up to the first way that fits."""
    found: dict[str, dict[str, str]] = {way: {} for way in WAYS}
    for gpu in CARDS:
        for way in WAYS:
            found[way][gpu] = answer(model, way, gpu)
            if found[way][gpu].startswith("fits"):
                break
    return found


def cell(ways: dict[str, dict[str, str]], gpu: str) -> str:
    """A cell of the table: the first way that fits the GPU with its GiB, or a dash."""
    for way, cards in ways.items():
        said, _, needs = cards.get(gpu, "").partition(": ")
        if said == "fits":
            return f"{way} {needs.removesuffix(' GiB')}"
    return "—"


def table(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """The table of the page, in Markdown."""
    heads = [f"{gpu} ({find_gpu(gpu).total_memory / 2**30:.1f})" for gpu in CARDS]
    rows = [["model", *heads], ["---"] * (1 + len(CARDS))]
    rows += [[name, *(cell(ways, gpu) for gpu in CARDS)] for name, ways in found.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main():
    file = Path(sys.argv[1]) if sys.argv[1:] else FILE
    found = json.loads(file.read_text()) if file.exists() else {}
    missing = sorted([name for name in NAMES if name not in found], key=is_slow)
    with ProcessPoolExecutor(2) as pool:
        jobs = {pool.submit(answers, name): name for name in missing}
        for job in tqdm(as_completed(jobs), total=len(jobs)):
            found[jobs[job]] = job.result()
            found = {name: found[name] for name in NAMES if name in found}  # catalogue's order
            # After every model, so that an interrupted run loses nothing.
            file.write_text(json.dumps(found, indent=1) + "\n")
    # Replace the one table of the page: from its header to the next empty line.
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("| model |")
    _, _, after = rest.partition("\n\n")
    PAGE.write_text(f"{before}{table(found)}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
