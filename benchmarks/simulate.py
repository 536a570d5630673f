"""Measure the time and memory of simulations, compare them with MemTracker, and time plans.

Each recipe gets its own process, so that its peak memory is its own. Measured are the CPU seconds
of one `simulate` after all imports, and the process's peak resident memory. Then `simulate` and
PyTorch's MemTracker on fake tensors run in turns in one process, and the ratio of their times is
printed. At the end a plan for an 8B model is timed, as a call and as a command. The command's time
includes its imports.
"""

import contextlib
import resource
import statistics
import subprocess
import sys
import time

from memlab import Recipe, simulate

LORA = {"precision": "bf16", "attention": "sdpa", "lora_rank": 16, "checkpointing": True}
QLORA = LORA | {"base": "nf4", "upcast": False}
RECIPES = {
    "BERT-large, fp32": Recipe("bert-large", batch_size=8),
    "BERT-large, autocast, checkpointing": Recipe(
        "bert-large", batch_size=8, precision="fp16-amp", checkpointing=True
    ),
    "BERT-large, Adafactor": Recipe("bert-large", batch_size=8, optimizer="adafactor"),
    "8B LoRA": Recipe("llama-3-8b", seq_len=2048, **LORA),
    "8B QLoRA": Recipe("llama-3-8b", seq_len=2048, **QLORA),
    "70B QLoRA": Recipe("llama-2-70b", seq_len=2048, **QLORA),
}
COMPARED = "BERT-large, fp32"
ROUNDS = 3
PLANS = (("T4", 512), ("L4", 2048), ("A100-80GB", 2048), ("H100", 2048))


def cost(label) -> None:
    """Print the CPU seconds and the peak memory of one simulation, in this process."""
    simulate(Recipe("gpt2-tiny", seq_len=16, lora_rank=2, base="nf4"))  # imports
    start = time.process_time()
    simulate(RECIPES[label])
    seconds = time.process_time() - start
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{label:<38}{seconds:>8.2f} s{highest:>10,.0f} MiB", flush=True)


def memtracked(recipe) -> None:
    """Run two steps under PyTorch's MemTracker, at full depth and with CPU kernels."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from memlab.card.fake_tensors import tensors_without_data
    from memlab.workloads.training import Training

    with contextlib.ExitStack() as stack:
        stack.enter_context(tensors_without_data())
        training = Training(recipe)
        tracker = MemTracker()
        tracker.track_external(training.model, training.optimizer)
        stack.enter_context(tracker)
        training.step()
        tracker.reset_mod_stats()  # MemTracker follows one step at a time
        training.step()


def seconds_of_a_plan(gpu, seq_len) -> None:
    """Print the seconds of a process's first `plan`, and those of the command."""
    asked = ["--model", "llama-3-8b", "--gpu", gpu, "--seq-len", str(seq_len)]
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "memlab.cli", "plan", *asked], check=True, capture_output=True
    )
    command = time.monotonic() - start
    code = "import time, memlab.planner.search as c; t = time.monotonic(); "
    code += f"c.plan('llama-3-8b', {gpu!r}, {seq_len}); print(time.monotonic() - t)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    print(f"plan of 8B on {gpu}, {seq_len} tokens: {float(told.stdout):.1f} s, {command:.1f} s")


def main():
    if len(sys.argv) > 1:
        return cost(sys.argv[1])
    for label in RECIPES:
        subprocess.run([sys.executable, "-W", "ignore", __file__, label], check=True)
    recipe, seconds = RECIPES[COMPARED], {simulate: [], memtracked: []}
    for _ in range(ROUNDS):
        for run, taken in seconds.items():
            start = time.process_time()
            run(recipe)
            taken.append(time.process_time() - start)
    ours, theirs = (statistics.median(taken) for taken in seconds.values())
    print(
        f"{COMPARED}: simulate {ours:.2f} s, MemTracker {theirs:.2f} s, {theirs / ours:.1f} times"
    )
    for gpu, seq_len in PLANS:
        seconds_of_a_plan(gpu, seq_len)


if __name__ == "__main__":
    main()
