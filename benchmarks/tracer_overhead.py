"""How much slower is a step under the tracer, and under MemTracker and the profiler?

Ratios of medians in one run, the variants taking turns, with the bare step twice as control.
The budget is 1.5 for the tracer.
"""

import statistics
import time

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from memlab import Recipe
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

RECIPES = {
    "BERT tiny, 8 x 256": Recipe(
        model="bert-large-tiny", batch_size=8, seq_len=256, optimizer="adamw_torch_loop"
    ),
    "GPT-2 tiny, 8 x 256, checkpointing": Recipe(
        model="gpt2-tiny", batch_size=8, seq_len=256, checkpointing=True
    ),
}
ROUNDS = 9


def bare(training):
    training.step()


def traced(training):
    with Tracer():
        training.step()


def memtracked(training):
    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer)
    with tracker:
        training.step()


def profiled(training):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ):
        training.step()


def main():
    variants = {
        "bare": bare,
        "bare again": bare,
        "tracer": traced,
        "MemTracker": memtracked,
        "profiler": profiled,
    }
    for label, recipe in RECIPES.items():
        training = Training(recipe)
        training.step()
        seconds = {name: [] for name in variants}
        for _ in range(ROUNDS):
            for name, step in variants.items():
                start = time.perf_counter()
                step(training)
                seconds[name].append(time.perf_counter() - start)
        base = statistics.median(seconds["bare"])
        print(f"{label}: bare step {base * 1e3:.0f} ms")
        for name, values in seconds.items():
            print(f"  {name:<12} {statistics.median(values) / base:.2f}")


if __name__ == "__main__":
    main()
