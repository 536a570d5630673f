"""Anatomy of a step: bytes of each kind at each moment, what layers keep, what a loss borrows."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from memlab import models
from memlab.book import drawing, show
from memlab.book.lessons import QUIET, trainer_losses
from memlab.card.device import SimulatedGPU
from memlab.footprint import NOT_TENSORS, Footprint, Phase
from memlab.gpus import find_gpu
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import GiB, MiB
from memlab.workloads.training import Training

GB = 10**9
KINDS = "parameters optimizer_states activations gradients temporary".split()
WIDTHS = {Phase.FORWARD: 2.0, Phase.BACKWARD: 2.0, Phase.STEP: 1.2}  # of a step as it is drawn
# Steps of `bare_steps`: those of its figure, and others.
DRAWN = "pure bf16, fused", "autocast, fused", "autocast, fused, gradients kept"
DRAWN = (*DRAWN, "fp32, multi-tensor")
UNDRAWN = "autocast, two micro-batches", "autocast, multi-tensor", "pure bf16, multi-tensor"
# What activations grow with, and between which two values.
GRID = {"layers": (4, 8), "hidden": (1024, 2048), "sequence": (2048, 4096), "batch": (4, 8)}


def drawn_at(run: Footprint) -> np.ndarray:
    """Where each moment of a step is drawn: each phase has its width of `WIDTHS`."""
    phases, x, left = run.timeline.phases, np.zeros(len(run.timeline.phases)), 0.0
    for phase, width in WIDTHS.items():
        same = (phase, Phase.ZERO_GRAD) if phase == Phase.STEP else (phase,)
        there = np.array([p in same for p in phases])
        x[there] = np.linspace(left, left + width, there.sum())
        left += width
    return x


def mark_phases(ax, height: float) -> None:
    """The names of the phases at a height, and a line where each one ends."""
    left = 0.0
    for phase, width in WIDTHS.items():
        ax.text(left + width / 2, height, phase.split()[-1], ha="center")
        left += width
        ax.axvline(left, color=show.GREY, linewidth=0.6)
    ax.set(xlim=(0, left), xticks=[])


def steps_figure(runs: Mapping[str, Footprint]) -> Figure:
    """One step of each run, by kind, in GiB, one above the other; a triangle is the peak."""
    fig, axes = show.figure(5, 2.6 * len(runs), nrows=len(runs))
    most = max(max(run.timeline.totals()) for run in runs.values()) / GiB
    for ax, (label, run) in zip(np.atleast_1d(axes), runs.items(), strict=True):
        x, totals = drawn_at(run), np.array(run.timeline.totals()) / GiB
        under = np.zeros(len(x))
        for kind in KINDS:
            over = under + np.array(run.timeline.levels[kind]) / GiB
            words, colour = kind.replace("_", " "), show.COLOURS[kind]
            ax.fill_between(x, under, over, label=words, color=colour, lw=0)
            under = over
        top = totals.argmax()
        ax.plot(x[top], totals[top], "v", color=show.GREY)
        ax.text(x[top] + 0.12, totals[top] + 0.2, f"{totals[top]:.1f}")
        mark_phases(ax, 1.15 * most)
        ax.set(ylim=(0, 1.12 * most), ylabel="GiB")
        ax.set_title(label, loc="left", pad=20)
    lines = np.atleast_1d(axes)[0].get_legend_handles_labels()
    fig.legend(*lines, loc="outside lower center", ncols=3)
    return fig


def draw_step(run: Footprint) -> Figure:
    """A lane for each kind of bytes over one step, its height to scale, with the most in GiB.

    Above each phase stands the highest sum of all kinds in it.
    """
    fig, ax = drawing.sheet(3.45)
    inch = (drawing.WIDTH - 0.2) / sum(WIDTHS.values())
    x = 0.1 + drawn_at(run) * inch
    # A fused step allocates nothing and has no moments of its own, only what waits before it.
    waits = max(i for i, p in enumerate(run.timeline.phases) if p == Phase.BACKWARD)
    edges = 0.1 + np.cumsum([0, *WIDTHS.values()][:-1]) * inch
    starts = dict(zip(WIDTHS, edges, strict=True))
    _, bins = np.unique((x / 0.02).astype(int), return_index=True)  # of moments, as fine as seen
    levels, x = run.timeline.levels, x[bins]
    lanes = {kind: np.maximum.reduceat(levels[kind], bins) / GiB for kind in KINDS}
    scale = 2.3 / sum(lane.max() for lane in lanes.values())  # inches a GiB
    # Where a label stands, and at which part of its lane's height.
    labels = dict.fromkeys(KINDS, (drawing.WIDTH / 2, 0.5, "center"))
    labels["activations"] = (starts[Phase.BACKWARD], 0.36, "center")
    for kind, phase in (("gradients", Phase.BACKWARD), ("temporary", Phase.STEP)):
        labels[kind] = (starts[phase] - 0.06, 0.65, "right")
    base = 0.06
    for kind, lane in lanes.items():
        ax.fill_between(x, base, base + lane * scale, color=show.COLOURS[kind], lw=0, zorder=2)
        at, part, side = labels[kind]
        middle = base + lane.max() * scale * part
        colour = drawing.ink(show.COLOURS[kind]) if side == "center" else show.GREY
        words = f"{kind.replace('_', ' ')} {lane.max():.1f} GiB"
        drawing.say(ax, at, middle, words, ha=side, color=colour, va="center_baseline")
        base += lane.max() * scale + 0.09
    worst, after = run.worst_of_each_phase(), run.timeline.totals()[waits]
    worst = {phase: worst.get(phase, after) for phase in WIDTHS}
    for phase, start in starts.items():
        width = WIDTHS[phase] * inch
        is_peak = worst[phase] == max(worst.values())
        most = f"{'peak' if is_peak else 'all'} {worst[phase] / GiB:.1f} GiB"
        look = {"fontsize": drawing.SMALL, "weight": "bold" if is_peak else "normal"}
        drawing.say(ax, start + width / 2, base + 0.4, phase.split()[-1], ha="center")
        drawing.say(ax, start + width / 2, base + 0.15, most, ha="center", **look)
        ax.plot([start] * 2, [0, base + 0.5], color=show.GREY, lw=0.6, zorder=0)
    return fig


def at_rest(recipe: Recipe, device: torch.device, ways: Iterable[str]) -> pd.DataFrame:
    """Bytes a parameter of the recipe's twin after two steps, gradients kept; a row a precision."""
    rows = {}
    for precision in ways:
        small = {"batch_size": 1, "seq_len": 16, "set_to_none": False}
        training = Training(recipe.twin(precision=precision, **small), device)
        training.step(), training.step()
        weights = list(training.model.parameters())
        states = training.optimizer.state.values()
        held = {
            "parameters": weights,
            "gradients": [weight.grad for weight in weights],
            "states": [s[key] for s in states for key in ("exp_avg", "exp_avg_sq")],
        }
        rows[precision] = {
            kind: sum(t.nbytes for t in tensors) / training.parameters
            for kind, tensors in held.items()
        }
    frame = pd.DataFrame(rows).T
    frame.insert(0, "sum", frame.sum(axis=1))
    return frame


def bare_steps(recipe: Recipe, labels: Iterable[str] = DRAWN) -> dict[str, Footprint]:
    """Steps of the recipe on one sequence of 8 tokens, by precision and form of AdamW.

    labels: of `DRAWN` and `UNDRAWN`.
    """
    bare = recipe.but(batch_size=1, seq_len=8, precision="fp32", optimizer="adamw_torch_fused")
    mixed, pure = bare.but(precision="bf16-amp"), bare.but(precision="bf16")
    ways = {
        "pure bf16, fused": pure,
        "autocast, fused": mixed,
        "autocast, fused, gradients kept": mixed.but(set_to_none=False),
        "fp32, multi-tensor": bare.but(optimizer="adamw_torch"),
        "autocast, two micro-batches": mixed.but(accumulation=2),
        "autocast, multi-tensor": mixed.but(optimizer="adamw_torch"),
        "pure bf16, multi-tensor": pure.but(optimizer="adamw_torch"),
    }
    return {label: simulate(ways[label]) for label in labels}


def bytes_a_parameter(run: Footprint) -> np.ndarray:
    """Bytes of tensors for each parameter, at each moment of a step."""
    levels = run.timeline.levels
    tensors = [levels[kind] for kind in levels if kind not in NOT_TENSORS]
    return np.sum(tensors, axis=0) / run.parameters


def bytes_figure(runs: Mapping[str, Footprint]) -> Figure:
    """Bytes a parameter over the steps of `DRAWN`, with their highest."""
    fig, ax = show.figure(5, 4.2)
    places = (0.05, 8.3, "left"), (0.05, 14.3, "left"), (0.05, 18.2, "left"), (3.9, 18.4, "right")
    hues = show.COLOURS.values()
    for (label, run), (x, y, side), hue in zip(runs.items(), places, hues, strict=False):
        levels = bytes_a_parameter(run)
        ax.plot(drawn_at(run), levels, color=hue)
        name = f"{label}: {levels.max():.1f}".replace(", gradients", ",\ngradients")
        name = name.replace("fp32, ", "fp32,\n")
        ax.text(x, y, name, color=hue, ha=side)
    mark_phases(ax, 23.3)
    ax.grid(visible=False)
    ax.set(ylabel="bytes a parameter", ylim=(0, 23), yticks=(0, 6, 8, 12, 16, 18, 20))
    return fig


def inference_bytes(frozen: bool) -> float:
    """Bytes a parameter at the peak of BERT-large's forward pass under autocast and no_grad."""
    with SimulatedGPU() as gpu:
        model = models.build("bert-large").to("cuda").eval().requires_grad_(not frozen)
        tokens = torch.ones(1, 8, dtype=torch.long, device="cuda")
        gpu.reset_peak()
        with torch.no_grad(), torch.autocast("cuda"):
            model(input_ids=tokens)
        return gpu.footprint.peak_tensors / sum(p.numel() for p in model.parameters())


def saved_tensors(output: torch.Tensor) -> dict[int, tuple[str, torch.Tensor]]:
    """Storage -> (node, tensor) of all that the graph below an output keeps for backward.

    Every node of autograd's graph refers to what its formula needs in attributes that begin with
    `_saved_`.
    """
    seen, found, todo = set(), {}, [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        for name in filter(lambda name: name.startswith("_saved_"), dir(node)):
            tensor = getattr(node, name)
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                found.setdefault(key, (node.name(), tensor))
    return found


def kept_by_bert_layer(batch: int, length: int) -> pd.DataFrame:
    """What a BERT-large layer in bf16 with eager attention keeps, in bytes a hidden value.

    A row for the tensors of one shape that operations of one kind keep, weights left out.
    """
    with SimulatedGPU():
        model = models.build("bert-large", dtype=torch.bfloat16).to("cuda")
        shape = batch, length, model.config.hidden_size
        x = torch.randn(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        found = saved_tensors(model.bert.encoder.layer[0](x))
        for parameter in model.parameters():
            found.pop(parameter.untyped_storage()._cdata, None)
        rows = [
            {
                "bytes / sbh": tensor.untyped_storage().nbytes() / x.numel(),
                "kept for": node.removesuffix("Backward0"),
                "shape": str(list(tensor.shape)),
                "dtype": str(tensor.dtype)[6:],
            }
            for node, tensor in found.values()
        ]
    frame = pd.DataFrame(rows)
    same = frame.groupby(["kept for", "shape", "dtype"], sort=False).agg(
        **{"tensors": ("shape", "size"), "bytes / sbh": ("bytes / sbh", "sum")}
    )
    return same[same["bytes / sbh"] > 0.1].reset_index()


def kept(recipe: Recipe) -> int:
    """Bytes that wait for the backward pass when the forward pass ends."""
    with SimulatedGPU() as gpu:
        training = Training(recipe, gpu.device)
        with training.autocast():
            loss = training.model(**training.batches[0]).loss
        waiting = gpu.footprint.timeline.levels["temporary"][-1]
        del loss
    return waiting


def coefficients(model: str, precision: str, attention: str) -> tuple[float, float]:
    """(A, B) of a layer that keeps A + B * a * s / h bytes times s*b*h.

    A model of three layers keeps one layer more than one of two; three pairs of batch and length
    give both unknowns, and a third that depends on neither: autocast's copies of weights.
    """
    config = models.config(model)
    heads, width = config.num_attention_heads, config.hidden_size
    how, system, layer = {"precision": precision, "attention": attention}, [], []
    for batch, length in ((1, 256), (2, 256), (1, 512)):
        sizes = {"batch_size": batch, "seq_len": length}
        cut = (models.with_layers(config, n) for n in (2, 3))
        two, three = (kept(Recipe(model=one, **sizes, **how)) for one in cut)
        system.append((1, length * batch * width, heads * length**2 * batch))
        layer.append(three - two)
    _, linear, square = np.linalg.solve(system, layer)
    return float(linear), float(square)


def layers_table() -> pd.DataFrame:
    """`coefficients` of six layers, a row each."""
    cases = [
        ("bert-large", "fp32", "eager"),
        ("bert-large", "fp32", "sdpa"),
        ("bert-large", "bf16-amp", "sdpa"),
        ("bert-large", "bf16", "sdpa"),
        ("gpt2", "bf16", "sdpa"),
        ("llama-3.2-1b", "bf16", "sdpa"),
    ]
    rows = {" ".join(case): coefficients(*case) for case in cases}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["A", "B of as/h"])
    return frame.round(2).abs()


def growth() -> dict[tuple[str, str], float]:
    """(attention, size) -> the power with which BERT's activations grow, by `GRID`."""
    powers = {}
    for attention in ("eager", "sdpa"):
        for name, pair in GRID.items():
            found = []
            for value in pair:
                sizes = {"layers": 3, "hidden": 1024, "sequence": 512, "batch": 1, name: value}
                config = models.with_layers(models.config("bert-large"), sizes["layers"])
                config.max_position_embeddings = 4096
                config.hidden_size = width = sizes["hidden"]
                config.num_attention_heads, config.intermediate_size = width // 64, 4 * width
                shape = {"batch_size": sizes["batch"], "seq_len": sizes["sequence"]}
                found.append(kept(Recipe(config, **shape, attention=attention)))
            powers[attention, name] = float(np.log2(found[1] / found[0]))
    return powers


def bytes_per_logit(precision: str) -> float:
    """Bytes that the peak of a one-layer Llama 3 rises by for each logit.

    The vocabulary doubles at two lengths; what grows with it alone, as autocast's copy of the
    output matrix does, cancels.
    """
    vocabulary, batch = models.config("llama-3-8b").vocab_size, 4

    def peak(words: int, length: int) -> int:
        config = models.with_layers(models.config("llama-3-8b"), 1)
        config.vocab_size, config.bos_token_id, config.eos_token_id = words, 1, 1
        how = {"batch_size": batch, "seq_len": length, "precision": precision}
        how |= {"attention": "sdpa", "optimizer": "adamw_torch_fused"}
        return simulate(Recipe(config, **how)).peak_tensors

    short, long = (peak(vocabulary, n) - peak(vocabulary // 2, n) for n in (1024, 2048))
    return (long - short) / (batch * 1024 * vocabulary / 2)


def loss_peak(
    loss_of: Callable, tokens: int = 8192, vocabulary: int = 128_256, width: int = 4096
) -> int:
    """Bytes at the peak of a loss and its backward in bf16, above what it is given.

    loss_of: a function of (hidden states, output matrix, labels).
    """
    with SimulatedGPU("A100-80GB"):
        bf16 = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
        hidden, head = torch.randn(tokens, width, **bf16), torch.randn(vocabulary, width, **bf16)
        labels = torch.zeros(tokens, dtype=torch.long, device="cuda")
        before = torch.cuda.memory_allocated()
        loss_of(hidden, head, labels).backward()
        return torch.cuda.max_memory_allocated() - before


def train_with(recipe: Recipe, callback) -> None:
    """Four steps of a recipe with transformers' Trainer and a callback of its own."""
    import tempfile

    from transformers import Trainer

    sixteen = Training(recipe.but(batch_size=4 * recipe.batch_size))
    rows = sixteen.batches[0]
    data = [{k: v[i] for k, v in rows.items()} for i in range(4 * recipe.batch_size)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = recipe.training_arguments(folder, max_steps=4, **QUIET)
        trainer = Trainer(sixteen.model, arguments, train_dataset=data, callbacks=[callback])
        trainer_losses(trainer)


def results_first(results: int) -> float:
    """The free part of a card of 1 GiB that holds results of 36 MiB and then scratch of 64."""
    with SimulatedGPU(GiB):
        make = {"dtype": torch.uint8, "device": "cuda"}
        held = [torch.empty(36 * MiB, **make) for _ in range(results)]
        for _ in held:
            torch.empty(64 * MiB, **make)
        return 1 - torch.cuda.memory_allocated() / GiB


def segments_figure(segments: list[dict]) -> Figure:
    """The allocator's segments, a row each, in MiB: blocks in use are filled, free ones empty."""
    fig, ax = show.figure(5, 3.0)
    for row, segment in enumerate(reversed(segments)):
        left = 0.0
        for block in segment["blocks"]:
            used, size = block["state"] != "inactive", block["size"] / MiB
            colour = show.COLOURS["activations"] if used else "none"
            ax.barh(row, size, left=left, color=colour, edgecolor=show.GREY, height=0.8)
            left += size
    ax.set(xlabel="MiB of a segment", ylabel="segment", yticks=[])
    ax.invert_yaxis()
    ax.grid(visible=False)
    return fig


def rules_of_thumb(bert: Footprint) -> pd.DataFrame:
    """Four rules beside the truth, in MiB.

    bert: BERT-large at 8 x 512, beside accelerate's estimate of it.
    """
    from accelerate.utils import calculate_maximum_sizes

    shape = {"batch_size": 8, "seq_len": 1024, "attention": "sdpa"}
    gpt = simulate(Recipe("gpt2", **shape, optimizer="adamw_torch_fused"))
    with SimulatedGPU():
        listed = sum(t.numel() for t in models.build("gpt2").state_dict().values())
        weights, _ = calculate_maximum_sizes(models.build("bert-large"))
    once = 16 * gpt.parameters
    rows = {
        "16 x parameters": (once, gpt.peak_tensors),
        "estimate-memory": (4 * weights, bert.peak_tensors),
        "tied twice": (16 * listed, once),
        "GB for GiB": (15.5 * GB, find_gpu("T4").usable),
    }
    return pd.DataFrame(rows, index=["rule", "truth"]).T / MiB
