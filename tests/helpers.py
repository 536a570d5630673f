"""What several tests ask in the same words."""

import contextlib
import importlib
import re
import subprocess
import sys

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from memlab import Recipe, SimulatedGPU, models, simulate
from memlab.card.kernels.rules import RULES
from memlab.evidence.records import Record
from memlab.footprint import NOT_TENSORS
from memlab.spec.serving import cached_shapes
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

TINY = Recipe(model="gpt2-tiny", batch_size=1, seq_len=16)
QLORA = Recipe("llama-3-8b-tiny", seq_len=16, lora_rank=2, base="nf4", precision="bf16-amp")

# Sizes of a config: a small decoder, of whatever family.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def allocated() -> int:
    """The bytes that lie on the card, as PyTorch counts them."""
    return torch.cuda.memory_allocated()


def one_line(error) -> str:
    """The text of a caught error, which must be one line."""
    text = str(error.value)
    assert "\n" not in text
    return text


@contextlib.contextmanager
def refused(*parts, kind=ValueError):
    """What is done inside is refused in one line, with these words or patterns."""
    with pytest.raises(kind) as error:
        yield
    text = one_line(error)
    for part in parts:
        assert part in text or re.search(part, text), text


TWO = TINY.but(batch_size=2, seq_len=32)


def a_run(figures, device="Tesla T4", kind="recorded", recipe=TWO) -> Record:
    """A record of a small recipe."""
    plain = {"model": recipe.model, "batch_size": recipe.batch_size, "seq_len": recipe.seq_len}
    return Record(kind, "one", plain, figures, device, None, {}, "2026-11-21", "a test")


def run_python(code, *arguments, **how) -> subprocess.CompletedProcess:
    """A new process of this Python, which ran some code without an error."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    return done


def import_or_skip(name):
    """A module, or a skip of the file: also where it was built for another PyTorch."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}", allow_module_level=True)


def on_the_cpu(loop):
    """(the footprint, what it gives) of a loop that is run for real, without a card."""
    with Tracer() as tracer:
        result = loop()
    return tracer.footprint(), result


def assert_as_on_the_cpu(card, cpu, more_there=0, small=0):
    """A loop's tensors on the card, at their worst, are the real one's.

    more_there: bytes that the kernels or the data of a CPU keep and those of a card do not.
    small: bytes by which they may differ, such as of batches, which lie on the host.
    """
    (phase, found), (real_phase, real) = highest(card.timeline), highest(cpu.timeline)
    assert phase == real_phase
    for category in ("parameters", "gradients"):
        assert found[category] == real[category], category
    # Unless the step is fused or capturable, AdamW's counts of steps lie on the host.
    life = cpu.timeline.lives
    counts = sum(
        one.nbytes for one in life if one.category == "optimizer_states" and one.nbytes == 4
    )
    on_host = real["optimizer_states"] - found["optimizer_states"]
    assert on_host in (0, counts)
    wanted = sum(real.values()) - on_host - more_there
    assert sum(found.values()) == pytest.approx(wanted, abs=small)


def assert_as_simulated(footprint, recipe, gpu, small=1024):
    """A library's loop holds on a card what its recipe's simulation holds.

    small: bytes by which the tensors may differ.
    """
    simulated = simulate(recipe, gpu)
    assert footprint.peak_phase == simulated.peak_phase
    assert footprint.peak_tensors == pytest.approx(simulated.peak_tensors, abs=small)
    for category in ("parameters", "gradients", "optimizer_states"):
        assert footprint.breakdown[category] == simulated.breakdown[category], category


def highest(timeline, left_out=()):
    """(the phase, bytes by category) of the moment with the most tensors."""
    left_out = (*NOT_TENSORS, *left_out)
    levels = {name: level for name, level in timeline.levels.items() if name not in left_out}
    totals = [sum(moment) for moment in zip(*levels.values(), strict=True)]
    moment = totals.index(max(totals))
    return timeline.phases[moment], {name: level[moment] for name, level in levels.items()}


def most(footprint, category) -> int:
    """The most bytes that a category had."""
    return max(footprint.timeline.levels[category])


def assert_two_steps_as_on_the_cpu(recipe):
    """Two steps of a recipe hold on a card what they hold for real, without a card."""

    def two_steps(device, built_in=None):
        training = Training(recipe, device, built_in=built_in)
        training.model.eval()  # dropout's masks are narrower on a card
        for _ in range(2):
            training.step()
        return training

    two_steps("cpu")  # the first of a process keeps a few bytes longer
    real, _ = on_the_cpu(lambda: two_steps("cpu"))
    # A CPU's softmax has no scratch in its backward pass.
    with SimulatedGPU(rules=frozenset(RULES) - {"scratch of kernels"}) as gpu:
        two_steps(gpu.device, gpu.device)
    assert_as_on_the_cpu(gpu.footprint, real)


def kv_cache_bytes(model, tokens, batch_size=1, bytes_each=2):
    """Layers x 2 x key-value heads x head size x bytes x tokens x batch, by transformers' layers.

    Pope et al. 2023, Efficiently Scaling Transformer Inference.
    """
    config = models.config(model)
    numbers = sum(heads * size for heads, size in cached_shapes(config))
    growing = [one for one in DynamicCache(config=config).layers if isinstance(one, DynamicLayer)]
    kept = sum(min(tokens, getattr(one, "sliding_window", tokens)) for one in growing)
    return round(numbers * bytes_each * kept * batch_size)
