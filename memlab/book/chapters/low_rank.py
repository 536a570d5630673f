"""LoRA and QLoRA in bytes: deep models from two layers, tables, failures and what peft takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd
import peft
import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

from memlab import models
from memlab.book import show
from memlab.book.lessons import three_steps, train_step
from memlab.footprint import Footprint
from memlab.gpus import find_gpu
from memlab.libraries import import_bitsandbytes
from memlab.predict.measure import Meter, measure
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.trace.quantized_weights import constants
from memlab.units import MiB
from memlab.workloads.optimizers import LEARNING_RATE
from memlab.workloads.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TINY = "llama-3-8b-tiny"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# torchtune's README at 0031bfb, Llama 3.1 8B on one RTX 4090: GiB at the peak, tokens a second.
TORCHTUNE = {"LoRA": (16.2, 3083), "QLoRA": (7.4, 2413)}
TORCHTUNE_TOKENS = 2 * 2048  # of a step


def whole(recipe: Recipe, card: str = "RTX-4090") -> Footprint:
    """A deep model's footprint at its peak, from simulated runs of one and of two layers.

    The card is one like that with room for all: estimated seconds of what does not fit, too.
    """
    roomy = find_gpu(card).without_limit()
    few = [models.with_layers(recipe.model, n) for n in (1, 2)]
    one, two = (simulate(recipe.but(model=config), roomy) for config in few)
    more = models.config(recipe.model).num_hidden_layers - 2

    def all_of(get: Callable) -> float:
        return get(two) + more * (get(two) - get(one))

    assert two.step_time is not None
    time = two.step_time
    parts = {n: all_of(lambda f, n=n: f.breakdown.get(n, 0)) for n in two.breakdown}
    spent = {n: all_of(lambda f, n=n: f.step_time.parts[n]) for n in time.parts}
    ends = {
        n: all_of(lambda f, n=n: getattr(f.step_time, n))
        for n in ("low", "expected", "high", "flops")
    }
    return replace(
        two,
        breakdown=parts,
        peak_allocated=sum(parts.values()),
        peak_reserved=None,
        step_time=replace(time, parts=spent, **ends),
        trainable_parameters=all_of(lambda f: f.trainable_parameters),
    )


def seconds(run: Footprint) -> str:
    """The estimated seconds of a step, from low to high."""
    assert run.step_time is not None
    return show.between(run.step_time.low, run.step_time.high)


def draw_idea(trained: Mapping[str, float]) -> Figure:
    """W, B and A as areas, and the trained share against the rank.

    trained: share of a model's weights that adapters of rank 1 are, by the name of the line.
    """
    fig, (ax, share_ax) = show.figure(7, 3, ncols=2)
    boxes = {"W\nfrozen": (0, 0, 8, 8, "inputs"), "B": (9, 0, 1, 8, "gradients")}
    boxes["A"] = (10.6, 7, 8, 1, "gradients")
    for label, (x, y, wide, high, hue) in boxes.items():
        ax.bar(x, high, bottom=y, width=wide, align="edge", color=show.COLOURS[hue])
        ax.text(x + wide / 2, y + high / 2, label, ha="center", va="center", color="k")
    ax.set(xlim=(-0.5, 19), ylim=(-0.5, 8.5), aspect="equal")
    ax.set_axis_off()
    for (name, each), colour in zip(trained.items(), show.COLOURS.values(), strict=False):
        share_ax.plot([1, 256], [100 * each, 25600 * each], color=colour)
        side = dict(ha="right", va="bottom") if each == max(trained.values()) else dict(va="top")
        share_ax.text(16, 1600 * each, f" {name} ", color=colour, **side)
    share_ax.axhline(1, color=show.GREY, linestyle="--")
    share_ax.set(xscale="log", yscale="log", xlabel="rank", ylabel="trained, %")
    return fig


def same_start(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Copy peft's random matrices A to adapters that are called A and B."""
    own = dict(mine.named_parameters())
    for name, weight in theirs.named_parameters():
        if "lora_A" in name:
            name = name.replace("lora_A.default", "A").removeprefix("base_model.model.")
            if name in own:
                own[name].data.copy_(weight)


def compared_with_peft(lora_start: Callable, device: torch.device) -> tuple[list[str], float, int]:
    """(names of the weights that get a gradient in peft's adapted twin, the largest difference of
    three losses, the difference of the peaks in bytes).

    lora_start: (model, rank, names) -> the optimizer of its own adapters, which start as peft's.
    """
    tiny = Recipe(TINY, batch_size=2, seq_len=64)
    mine = Training(tiny, device)
    mine.optimizer = lora_start(mine.model, 4, LINEAR)
    mine.optimizer.param_groups[0]["lr"] = LEARNING_RATE
    library = Training(tiny.but(lora_rank=4), device)
    same_start(mine.model, library.model)
    batch = mine.batches[0]
    ours, here = three_steps(mine, lambda: train_step(mine.model, mine.optimizer, batch))
    theirs, there = three_steps(library)
    library.model(**library.batches[0]).loss.backward()
    names = [n for n, p in library.model.named_parameters() if p.grad is not None]
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return names, apart, here.peak_allocated - there.peak_allocated


def adapter_weights(name: str, rank: int, targets: Iterable[str] | None = None) -> int:
    """Weights of LoRA adapters: rank x (inputs + outputs) of each linear layer but the head."""
    with torch.device("meta"):
        modules = models.build(name).base_model.named_modules()
    return rank * sum(
        m.in_features + m.out_features
        for n, m in modules
        if isinstance(m, torch.nn.Linear) and (targets is None or n.split(".")[-1] in targets)
    )


def model_weights(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in models.build(name).parameters())


def q_and_v(model: models.Model) -> str:
    """The projections of a model that peft adapts by default: queries and values of most."""
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING | {"phi3": ["qkv_proj"]}
    return ",".join(known.get(models.config(model).model_type, ("q_proj", "v_proj")))


def variants(full: Recipe, lora: Recipe) -> dict[str, Footprint]:
    """Full training and LoRA in pure bf16; from the third row on adapters are in bf16, too."""
    bf16 = dict(base="none", precision="bf16")
    half = lora.but(lora_fp32=False, **bf16)
    roomy = find_gpu("RTX-4090").without_limit()
    recipes = {"fp32 adapters": lora.but(**bf16), "bf16 adapters": half}
    recipes["with dropout"] = half.but(lora_dropout=0.05)
    recipes["on q and v only"] = half.but(lora_targets=q_and_v(full.model))
    recipes["with checkpointing"] = half.but(checkpointing=True)
    runs = {"full training": simulate(full.but(**bf16), roomy)}
    return runs | {name: whole(recipe) for name, recipe in recipes.items()}


def pieces(model: str = "llama-3.2-1b", **sizes: int) -> dict[str, Footprint]:
    """QLoRA put together piece by piece, with adapters on q and v; each has the one before.

    sizes: of the recipe, in place of 8 sequences of 512 tokens and rank 16.
    """
    shape = dict(batch_size=8, seq_len=512, lora_rank=16) | sizes
    lora = Recipe(model, precision="bf16", attention="sdpa", **shape)
    lora = lora.but(optimizer="adamw_torch_fused", lora_fp32=False)
    lora = lora.but(lora_targets=q_and_v(model))
    recipes = {"LoRA, bf16 base": lora}
    nf4 = recipes["base in NF4"] = lora.but(base="nf4", upcast=False)
    nf4 = recipes["double quantization"] = nf4.but(double_quant=True)
    amp = recipes["cast, autocast"] = nf4.but(upcast=True, precision="bf16-amp")
    recipes["cast, no autocast"] = nf4.but(upcast=True)
    recipes["autocast, checkpointing"] = amp.but(checkpointing=True)
    return {name: whole(recipe) for name, recipe in recipes.items()}


def variants_table(variants: Mapping[str, Footprint]) -> pd.DataFrame:
    """A row a run: MiB at the peak, and the estimated seconds from low to high."""
    weights = max(run.trainable_parameters for run in variants.values())  # full training's
    rows = {}
    for name, run in variants.items():
        held = {n: run.breakdown.get(n, 0) / MiB for n in run.breakdown}
        rows[name] = {
            "peak": run.peak_allocated / MiB,
            "s a step, estimated": seconds(run),
            "activations": held["activations"],
            "parameters": held["parameters"],
            "gradients, states": held.get("gradients", 0) + held.get("optimizer_states", 0),
            "trained": f"{run.trainable_parameters / weights:.2%}",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def trapped(adapt: Callable[[torch.nn.Module], object]) -> dict[tuple[str, str], str]:
    """Which adapters get a gradient under checkpoints, by task and kind of checkpointing.

    adapt: puts adapters, modules with a layer A, on a model whose weights it freezes.
    """
    ways = {"reentrant": (True, False), "reentrant, inputs ask": (True, True)}
    ways["non-reentrant"] = (False, False)
    tasks = "causal-lm", "sequence-classification"
    return {(t, way): _gradients(adapt, t, *how) for t in tasks for way, how in ways.items()}


def _gradients(adapt: Callable, task: str, reentrant: bool, inputs_ask: bool) -> str:
    model = models.build(TINY, task)
    adapt(model)
    if task == "sequence-classification":
        model.score.requires_grad_(True)
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or model.gradient_checkpointing_enable  # its older name
    enable({"use_reentrant": reentrant})
    if not inputs_ask:
        model.disable_input_require_grads()
    ids = torch.ones(2, 8, dtype=torch.long)
    labels = ids if task == "causal-lm" else torch.tensor([0, 1])
    try:
        model(input_ids=ids, labels=labels).loss.backward()
    except RuntimeError as error:
        return str(error)[:42]
    found = [m for m in model.modules() if hasattr(m, "A")]
    reached = sum(m.A.weight.grad is not None for m in found)
    return f"{reached} of {len(found)} adapters have a gradient"


def half_dtype(device: torch.device) -> torch.dtype:
    """bf16, or fp16 on a card without it."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def nf4_layer(device: torch.device) -> tuple[object, float, float]:
    """bitsandbytes' layer of 2,048 x 2,048: (its quant_state, bits a weight, relative error)."""
    bnb = import_bitsandbytes("this chapter")
    torch.manual_seed(0)
    linear = torch.nn.Linear(2048, 2048, bias=False)
    layer = bnb.nn.Linear4bit(2048, 2048, bias=False, compute_dtype=half_dtype(device))
    weight = linear.weight.data
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    layer = layer.to(device)
    state = layer.weight.quant_state
    held = sum(t.nbytes for t in (layer.weight, *constants(layer.weight)))
    back = bnb.functional.dequantize_4bit(layer.weight.data, state).cpu()
    error = (back - weight).norm() / weight.norm()
    return state, 8 * held / weight.numel(), error.item()


def torchtune_recipes() -> dict[str, Recipe]:
    """What torchtune's table names: Llama 3.1 8B, 2 x 2,048 tokens, checkpoints, loss in parts.

    Adapters of rank 8 on q and v and all in bf16, as in its configs; its layers are compiled and
    its NF4 is torchao's.
    """
    lora = Recipe("llama-3.1-8b", batch_size=2, seq_len=2048, precision="bf16")
    lora = lora.but(attention="sdpa", optimizer="adamw_torch_fused", checkpointing=True)
    lora = lora.but(loss="chunked", lora_rank=8, lora_targets="q_proj,v_proj", lora_fp32=False)
    return {"LoRA": lora, "QLoRA": lora.but(base="nf4", double_quant=True, upcast=False)}


def like_for_like(recipes: Mapping[str, Recipe]) -> pd.DataFrame:
    """GiB at the peak and seconds of a step: predicted, and as torchtune published them."""
    rows = {}
    for name, recipe in recipes.items():
        run, (peak, tokens) = whole(recipe), TORCHTUNE[name]
        rows[name] = {
            "GiB, simulated": f"{run.peak_allocated / 2**30:.1f}",
            "GiB, published": f"{peak:.1f}",
            "s a step, estimated": seconds(run),
            "s a step, published": f"{TORCHTUNE_TOKENS / tokens:.2f}",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def ladder_table(ladder: Mapping[str, Footprint]) -> pd.DataFrame:
    """Models that train by QLoRA, beside what full training in bf16 holds at rest, in GiB."""
    rows = {}
    for name, run in ladder.items():
        count = model_weights(name)
        rows[name] = {
            "weights, 10^9": f"{count / 1e9:.1f}",
            "QLoRA, GiB": f"{run.peak_allocated / 2**30:,.1f}",
            "s a step, estimated": seconds(run),
            "full, bf16, GiB": f"{8 * count / 2**30:,.1f}",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def trained_here(recipe: Recipe, device: torch.device) -> Footprint:
    """The second of two steps of a real training on the card that is here."""
    from transformers.initialization import no_init_weights

    training = Training(recipe, device, built_in=no_init_weights())
    training.step()
    with Meter(device, empty_cache=False) as meter:
        training.step()
    del training
    torch.cuda.empty_cache()
    return meter.footprint


def trained_twins() -> dict[str, tuple]:
    """(Footprint predicted, Measurement) of one step of the twin, by LoRA and by QLoRA."""
    lora = Recipe(TINY, batch_size=4, seq_len=64, lora_rank=8)
    kinds = {"LoRA": lora, "QLoRA": lora.but(base="nf4", double_quant=True, upcast=False)}
    return {n: (simulate(r), measure(r, steps=1)) for n, r in kinds.items()}


def moved(rank: int, alpha: float, **how: object) -> tuple[float, float]:
    """One step of AdamW on an adapted twin: (change of the logits over their norm, loss)."""
    ids = Training(Recipe(TINY, batch_size=2, seq_len=64)).batches[0]["input_ids"]
    model = models.build(TINY)
    before = model(ids).logits.detach()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=LINEAR, **how)
    model = peft.get_peft_model(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loss = train_step(model, optimizer, {"input_ids": ids, "labels": ids})
    change = model(ids).logits.detach() - before
    return (change.norm() / before.norm()).item(), loss


def steps_by_alpha(ranks: Iterable[int] = (4, 16, 64)) -> pd.DataFrame:
    """How far one step moves the logits, by rank and rule for alpha."""
    rows = {
        f"rank {r}": {
            "α = 16": moved(r, 16)[0],
            "α = 2r": moved(r, 2 * r)[0],
            "rsLoRA": moved(r, 16, use_rslora=True)[0],
        }
        for r in ranks
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def peft_takes(rank: int, names: list[str]) -> str:
    """The layers of a twin that get adapters, and how large these are."""
    model = models.build(TINY)
    full = sum(p.numel() for p in model.model.layers.parameters())
    model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=names))
    adapters = [n for n, _ in model.named_modules() if n.endswith("lora_A")]
    found = sorted({name.split(".")[-2] for name in adapters})
    trained, _ = model.get_nb_trainable_parameters()
    return f"{found}, {trained / full:.1%} of the layers' weights"
