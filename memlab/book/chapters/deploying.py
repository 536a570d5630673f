"""Inference: what a cache takes, what compiling keeps, and formats side by side."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
import torch

from memlab import models
from memlab.book import drawing, show
from memlab.book.chapters.patients import Patients
from memlab.book.colours import SERVING_COLOURS
from memlab.book.lessons import in_turns
from memlab.gpus import find_gpu
from memlab.predict.formula_serving import kv_cache_bytes
from memlab.predict.server_capacity import ServerCapacity
from memlab.predict.serving import ServingFootprint, measure_serving
from memlab.predict.simulate import simulate
from memlab.spec.serving import Serving
from memlab.trace.quantized_weights import constants
from memlab.workloads.quantized import quantize_base

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

GiB = 2**30
BLUE = show.COLOURS["parameters"]
TORCHAO = importlib.util.find_spec("torchao") is not None
# vLLM's profile of Meta-Llama-3-8B, and the announcement of Llama 3.1: GiB.
PUBLISHED_WEIGHTS = 14.96
PUBLISHED_CACHES = {1024: 0.125, 16_000: 1.95, 128_000: 15.62}
# Texts at a time -> milliseconds a token of Llama 2 13B in fp16 on an A100 of 80 GB, 512 new ones
# after 512, with transformers of 2023: huggingface/optimum, tests/benchmark/README.md @0963862.
PUBLISHED_TOKENS = {1: 36.958, 2: 37.35, 4: 37.89, 8: 47.37, 16: 69.94}


def draw_caches(weights: int, name: str) -> Figure:
    """Caches of three models against the tokens in them, beside the named model's weights in
    bytes."""
    label = f"weights of {name}"
    tokens = [1024 * n for n in range(1, 129)]
    fig, ax = show.figure(6, 3)
    places = {"llama-2-7b": (76_000, 33, "left"), "llama-3.1-8b": (110_000, 9.8, "left")}
    places["qwen2.5-7b"] = (110_000, 2.4, "left")
    for (model, (x, y, side)), colour in zip(places.items(), show.COLOURS.values(), strict=False):
        ax.plot(tokens, [kv_cache_bytes(model, t) / GiB for t in tokens], color=colour)
        ax.text(x, y, model, color=colour, ha=side)
    ax.axhline(weights / GiB, color=show.GREY, linestyle="--")
    ax.annotate(
        label,
        (75_000, weights / GiB),
        (0, 5),
        textcoords="offset points",
        ha="center",
        color=show.GREY,
    )
    ax.set(xlabel="tokens in the cache", ylabel="GiB, fp16", ylim=(0, 40))
    return fig


def draw_cache(names: tuple[str, ...] = ("llama-2-7b", "llama-3-8b"), heads: int = 4) -> Figure:
    """A column of keys and values for each token and KV head, in 16 bits, beside query heads.

    heads: query heads of a layer that are drawn, with the cache that they read.
    """
    old, new = SERVING_COLOURS["kv_cache"], show.COLOURS["gradients"]
    pitch, wide, left = 0.32, 0.42, 0.78  # of query heads, of a token, where tokens begin
    high = heads * pitch + 0.62
    fig, ax = drawing.sheet(len(names) * high)
    for number, name in enumerate(names):
        config, top = models.config(name), (len(names) - number) * high
        layers, pairs = config.num_hidden_layers, config.num_key_value_heads
        token = kv_cache_bytes(name, 1)
        words = f"{layers} layers x {pairs} KV heads x {token // layers // pairs} bytes"
        title = name.replace("-", " ").title()
        drawing.say(
            ax, 0.03, top - 0.14, f"{title}: {token / 1024:,.0f} KiB a token", weight="bold"
        )
        drawing.say(ax, 0.03, top - 0.38, words, fontsize=drawing.SMALL)
        middles = [top - 0.7 - pitch * n for n in range(heads)]
        group = config.num_attention_heads // pairs
        for first in range(0, heads, group):
            readers = middles[first : first + group]
            y = sum(readers) / len(readers)
            for reader in readers:
                drawing.block(ax, (0.03, reader - 0.13), (0.26, 0.26), BLUE, "Q")
                ax.plot([0.31, left - 0.03], [reader, y], color=show.GREY, lw=1)
            drawing.block(ax, (left, y - 0.13), (2 * wide - 0.03, 0.26), old, "K, V")
            for at in range(2, 10):
                colour = old if at < 7 else new if at == 7 else ""
                place = left + at * wide, y - 0.13
                drawing.block(ax, place, (wide - 0.03, 0.26), colour, "new" if at == 7 else "")
    return fig


def published_table(weights: int) -> pd.DataFrame:
    """GiB as published and here. weights: bytes of Llama 3 8B's."""
    rows = {"weights, Llama 3 8B": (PUBLISHED_WEIGHTS, weights)}
    for tokens, gib in PUBLISHED_CACHES.items():
        held = kv_cache_bytes("llama-3.1-8b", tokens)
        rows[f"cache of {tokens:,} tokens, Llama 3.1 8B"] = gib, held
    frame = pd.DataFrame(rows, index=["published", "here"]).T
    frame["here"] /= GiB
    frame["error"] = show.error(frame["here"], frame["published"])
    return frame


def speed(run: ServingFootprint, new_tokens: int) -> str:
    """Estimated tokens a second, from low to high."""
    both = run.prefill_time, run.decode_time
    slow, fast = (new_tokens / sum(getattr(t, end) for t in both) for end in ("high", "low"))
    return show.between(slow, fast)


def token_times(texts: Iterable[int] = tuple(PUBLISHED_TOKENS)) -> pd.DataFrame:
    """Milliseconds a token of Llama 2 13B by texts at a time, published and estimated."""
    config = models.config("llama-2-7b")
    config.update({"hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 40})
    config.update({"num_attention_heads": 40, "num_key_value_heads": 40})
    how = dict(prompt=512, new_tokens=512, attention="eager")
    rows = {}
    for number in texts:
        published = PUBLISHED_TOKENS[number]
        run = simulate(Serving(config, batch_size=number, **how), "A100-80GB")
        estimated = 1000 * (run.prefill_time.expected + run.decode_time.expected) / 512
        rows[number] = published, estimated, show.error(estimated, published)
    return pd.DataFrame(rows, index=["published", "estimated", "error"]).T


TWINS = ("gpt2-tiny", "llama-3-8b-tiny", "t5-3b-tiny")


def compared_twins() -> pd.DataFrame:
    """Bytes of each part at the worst moment of each phase, simulated and live, in fp32.

    Four texts of 48 tokens, nine new ones.
    """
    rows = []
    for name in TWINS:
        how = dict(prompt=48, new_tokens=9, batch_size=4, weights="fp32")
        small = Serving(name, attention="eager", **how)
        card, here = simulate(small), measure_serving(small)
        for phase in ("prefill", "decode"):
            for part in ("weights", "kv_cache", "activations", "logits"):
                pair = (getattr(one, phase)[part] for one in (card, here))
                rows.append((name, phase, part, *pair))
    columns = "model phase category simulated live".split()
    frame = pd.DataFrame(rows, columns=columns)
    return frame[frame["live"] > 0].set_index(columns[:3])


def caches() -> dict[str, ServingFootprint]:
    """Mistral 7B with each kind of cache: 8 texts of 4,096 tokens and 64 new ones, fp16."""
    full, window = (models.config("mistral-7b") for _ in range(2))
    full.sliding_window, window.sliding_window = None, 1024
    many = Serving(full, prompt=4096, new_tokens=64, batch_size=8)
    kinds = {name: many.but(cache=name) for name in ("dynamic", "static", "fp8")}
    kinds |= {"sliding": many.but(model=window), "none": many.but(cache="none")}
    return {name: simulate(one) for name, one in kinds.items()}


def caches_table(runs: Mapping[str, ServingFootprint]) -> pd.DataFrame:
    """GiB of the cache at the end, and of the peaks of both phases."""
    rows = {
        name: [run.kv_cache, sum(run.prefill.values()), sum(run.decode.values())]
        for name, run in runs.items()
    }
    columns = ["cache at the end", "peak of prefill", "peak of decode"]
    return pd.DataFrame(rows, index=columns).T / GiB


def server_table(starts: Mapping[str, ServerCapacity]) -> Styler:
    """What each start takes, in GiB, and the tokens that its blocks hold, from least to most."""
    rows = {
        name: {
            "weights": f"{start.weights / GiB:.1f}",
            "largest batch": f"{start.borrowed / GiB:.1f}",
            "left for the cache": "{:.1f}–{:.1f}".format(*(n / GiB for n in start.cache)),
            "tokens": "{:,}–{:,}".format(*start.tokens) if start.tokens[1] else "it does not start",
        }
        for name, start in starts.items()
    }
    caption = "A server at its start, by the format of its weights: GiB, and tokens of the cache"
    return pd.DataFrame.from_dict(rows, orient="index").style.set_caption(caption)


class Paged(NamedTuple):
    """Texts at once where each has the longest reserved, and in blocks of 16 tokens; empty share
    of the blocks; lengths of the requests; bytes of a token and of the room."""

    reserved: int
    in_blocks: int
    empty: float
    lengths: torch.Tensor
    token: int
    room: int


def paged(weights: int, longest: int = 4096) -> Paged:
    """Four hundred requests of random lengths, on what an 80 GB card has left beside weights."""
    torch.manual_seed(0)
    lengths = torch.randint(100, longest + 1, (400,))
    token = kv_cache_bytes("llama-3-8b", 1)
    usable = find_gpu("A100-80GB").usable
    assert usable is not None
    room = usable - weights
    blocks = (lengths + 15) // 16
    fits = int((blocks.cumsum(0) * 16 * token <= room).sum())
    empty = 1 - lengths.sum().item() / (blocks.sum().item() * 16)
    return Paged(room // (longest * token), fits, empty, lengths, token, room)


def kept_for_backward(function: Callable) -> int:
    """Bytes that are kept beside the two inputs of 256 x 256."""
    kept, inputs = {}, [torch.randn(256, 256) for _ in range(2)]
    inputs = [x.requires_grad_() for x in inputs]
    own = {x.data_ptr() for x in inputs}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*inputs)
    return sum(n for place, n in kept.items() if place not in own)


def graphs_made() -> dict[str, int]:
    """Graphs that torch.compile makes of five calls."""
    from torch._dynamo.testing import CompileCounter

    calls = {"five times the same": [(8, [1.0])] * 5}
    calls["five sizes"] = [(n, [1.0]) for n in (8, 9, 10, 11, 12)]
    calls["five lists, each longer"] = [(8, [1.0] * n) for n in range(1, 6)]
    graphs = {}
    for name, given in calls.items():
        torch._dynamo.reset()
        counter = CompileCounter()
        scaled = torch.compile(lambda x, by: x * by[0], backend=counter)
        for size, by in given:
            scaled(torch.ones(size), by)
        graphs[name] = counter.frame_count
    return graphs


def in_format(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """A copy whose linear layers are in a format: fp32, bf16, int8, nf4, or one of torchao's."""
    model = copy.deepcopy(model).eval()
    if name == "bf16":
        return model.to(torch.bfloat16)
    if name.startswith("torchao"):
        import torchao.quantization as ao

        bits = torch.int8 if name.endswith("int8") else torch.int4
        ao.quantize_(model.model, ao.IntxWeightOnlyConfig(bits, ao.PerGroup(32)))
    elif name != "fp32":
        quantize_base(model, Serving("gpt2-tiny", weights=name, compute_dtype="fp32"))
        model.to("cpu")  # which quantizes
    return model


def held_by(model: torch.nn.Module) -> int:
    """Bytes of the weights with their scales."""
    tensors = []
    for weight in model.parameters():
        if hasattr(weight, "qdata"):  # torchao's: what is inside
            tensors += [t for t in vars(weight).values() if isinstance(t, torch.Tensor)]
        else:
            tensors += [weight, *constants(weight)]
    return sum(tensor.nbytes for tensor in tensors)


def compared_formats(patients: Patients) -> pd.DataFrame:
    """KiB, loss on unseen text and time over fp32's of the first patient in each format."""
    names = ["fp32", "bf16", "int8", "nf4"]
    names += ["torchao int8", "torchao int4"] if TORCHAO else []
    formats = {name: in_format(patients.models[0], name) for name in names}
    frame = pd.DataFrame(
        {
            "KiB": {name: held_by(model) / 1024 for name, model in formats.items()},
            "loss": {name: patients.loss(model) for name, model in formats.items()},
        }
    )
    runs = {n: lambda m=m: patients.loss(m) for n, m in formats.items()}
    times = in_turns(runs, 5).iloc[1:].median()
    frame["time, fp32 = 1"] = times / times["fp32"]
    return frame
