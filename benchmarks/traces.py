"""Check traces: does a replayed trace give the same result as a direct run?

    python benchmarks/traces.py [how many] [first seed] [ranks]

Random recipes of the catalogue's models on three GPUs are simulated twice: by their trace, and by a
run at their own sizes and full depth. The bytes of every category, allocated and reserved bytes,
the phase of the peak, the parameter counts and the seconds must be equal. The program prints
recipes that differ or have no trace, and counts the rest.
"""

import random
import sys
from collections import Counter

from memlab import Recipe, find_gpu, models
from memlab.gpus import GPU
from memlab.planner.space import NF4
from memlab.predict.recipe_log import refuse_format, with_all_micro_batches
from memlab.predict.run import log_of
from memlab.predict.simulate import serve
from memlab.predict.traces import Traces

CARDS = ("T4", "A100-80GB", "H100")
MODELS = [name for name in models.MODELS if not name.endswith("-tiny")]
OPTIMIZERS = "adamw_torch adamw_torch_fused adafactor adamw_8bit paged_adamw_8bit sgd lion_8bit"
SHARDED = ("ddp", "zero1", "zero2", "zero3")


def drawn(seed: int, ranks: int) -> tuple[Recipe, GPU]:
    """A random recipe and GPU. Raises ValueError if the recipe cannot be trained on the GPU."""
    draw = random.Random(seed)
    card, model = find_gpu(draw.choice(CARDS)), draw.choice(MODELS)
    native = ("bf16-amp", "bf16") if "bfloat16" in card.native_dtypes else ()
    way = draw.choice(("full", "full", "lora", "qlora"))
    longest = min(models.max_length(model) or 4096, 4096)
    values = {
        "precision": draw.choice(("fp32", "fp16-amp", *native)),
        "attention": draw.choice(("sdpa", "sdpa", "eager")),
        "checkpointing": draw.random() < 0.5,
        "accumulation": draw.choice((1, 1, 2, 4)),
        "optimizer": draw.choice(OPTIMIZERS.split()),
        "max_grad_norm": draw.choice((0.0, 1.0)),
        "set_to_none": draw.random() < 0.8,
        "seq_len": min(draw.choice((128, draw.randint(16, longest), 512, 1024)), longest),
        "batch_size": draw.choice((1, 2, 3, 8)),
    }
    if way != "full":
        values["lora_rank"] = draw.choice((4, 8, 16, 64))
    if way == "qlora":
        values |= NF4 | {"upcast": draw.random() < 0.5}
    if ranks > 1:
        values |= {"ranks": draw.choice((2, 4, 8)), "sharding": draw.choice(SHARDED)}
        values |= {"optimizer": "adamw_torch", "base": "none"}
    refuse_format(recipe := Recipe(model, **values), card)
    return recipe, card.without_limit()


def compared(footprint) -> tuple:
    """The parts of a footprint that must be equal; seconds are compared separately."""
    there = {name: nbytes for name, nbytes in footprint.breakdown.items() if nbytes}
    counted = footprint.parameters, footprint.trainable_parameters
    return footprint.peak_allocated, footprint.peak_reserved, there, counted, footprint.peak_phase


def main(number: int = 300, first: int = 0, ranks: int = 1) -> None:
    """Compare `number` recipes; print those that differ, and the counts."""
    traces, found, seed = Traces(), Counter(), first - 1
    while found.total() < number:
        seed += 1
        try:
            recipe, card = drawn(seed, ranks)
            run = serve(recipe, with_all_micro_batches(recipe, log_of(recipe, card)), card)
        except ValueError:
            continue
        trace = traces.of(recipe, card)
        if trace is None:
            found["no trace"] += 1
            print(seed, "no trace", recipe, card.name, flush=True)
            continue
        replayed = serve(recipe, traces.log(recipe, card), card)
        same = compared(replayed) == compared(run)
        late = abs(replayed.step_time.expected / run.step_time.expected - 1) > 1e-6
        found["equal" if same and not late else "different"] += 1
        if not same or late:
            print(seed, "different", recipe, card.name, flush=True)
    print(", ".join(f"{times} {name}" for name, times in found.items()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
