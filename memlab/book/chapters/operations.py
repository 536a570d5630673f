"""Operations of a forward pass by group, and whole models by what one layer keeps."""

from collections.abc import Callable, Mapping

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import PretrainedConfig

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.workloads.training import Training

GB = 10**9
# Of the whole models.
SHAPE = {"batch_size": 32, "seq_len": 1024, "precision": "bf16", "attention": "sdpa"}
STEPS = {  # plain operations and transcendental ones, for each value
    "_softmax": (4, 1),
    "native_layer_norm": (6, 0),
    "gelu": (3, 1),
    "tanh": (0, 1),
    "native_dropout": (2, 0),
}


def gpt_of_100_billion() -> PretrainedConfig:
    """The config of a GPT-like model of 125 layers of hidden size 8,192."""
    config = models.config("gpt2-xl")
    config.n_embd, config.n_head, config.n_layer = 8192, 64, 125
    return config


def waiting(recipe: Recipe) -> int:
    """Bytes that wait for the backward pass when the forward pass ends."""
    line = simulate(recipe).timeline
    return line.levels["activations"][line.phases.index("backward") - 1]


def one_layer(config: PretrainedConfig, **changes: object) -> float:
    """GB that a layer of `SHAPE` keeps: what three layers keep more than two."""
    two, three = (waiting(Recipe(models.with_layers(config, n), **SHAPE | changes)) for n in (2, 3))
    return (three - two) / GB


def parameters(config: PretrainedConfig) -> int:
    """The parameters of a model, counted without building its data."""
    with torch.device("meta"):
        return sum(p.numel() for p in models.build(config).parameters())


def whole_models(configs: Mapping[str, PretrainedConfig]) -> pd.DataFrame:
    """Parameters, and GB of weights, states and what all layers keep; a row a model."""
    rows = {}
    for name, config in configs.items():
        n, depth = parameters(config), config.num_hidden_layers
        rows[name] = {
            "parameters": n,
            "bf16 weights": 2 * n / GB,
            "16 bytes each": 16 * n / GB,
            "layers": depth * one_layer(config),
            "checkpoints": depth * one_layer(config, checkpointing=True),
        }
    return pd.DataFrame.from_dict(rows, orient="index").astype({"parameters": int})


def group_of(packet: Callable) -> str:
    """The group of an operation: tensor contractions, normalisations or element-wise."""
    if packet in flop_registry:
        return "tensor contractions"
    norms = ("softmax", "layer_norm")
    return "normalisations" if any(n in packet.__name__ for n in norms) else "element-wise"


class Ledger(TorchDispatchMode):
    """A row an operation on floating-point tensors: group, FLOPs, hard ones, and bytes touched.

    FLOPs of contractions are PyTorch's; those of the others are counted by `STEPS`, hard ones
    being exp, erf and tanh.
    """

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
        first = tensors[-1] if out is None else tree_leaves(out)[0]
        if func.is_view or not getattr(first, "is_floating_point", bool)():
            return out
        if packet in flop_registry:
            flops, hard = flop_registry[packet](*args, out_val=out), 0
        else:
            flops, hard = (n * first.numel() for n in STEPS.get(packet.__name__, (1, 0)))
        self.rows.append((group_of(packet), flops, hard, sum(t.nbytes for t in tensors)))
        return out


def by_group(recipe: Recipe) -> pd.DataFrame:
    """FLOPs, hard ones and bytes of the recipe's forward pass, simulated; a row a group."""
    with SimulatedGPU():
        training = Training(recipe)
        with Ledger() as ledger, torch.no_grad():
            training.model(**training.batches[0])
    frame = pd.DataFrame(ledger.rows, columns=["group", "flops", "hard", "bytes"])
    return frame.groupby("group").sum()


def times_by_group(recipe: Recipe, device: torch.device) -> pd.Series:
    """Microseconds of two forward passes on a device, a row a group; real ones."""
    training = Training(recipe, device)
    on_card = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + on_card]
    with profile(activities=kinds) as profiled, torch.no_grad():
        for _ in range(2):
            training.model(**training.batches[0])
    times: dict[str, float] = {}
    for event in profiled.key_averages():
        packet = getattr(torch.ops.aten, event.key.removeprefix("aten::"), None)
        if event.key.startswith("aten::") and packet is not None:
            spent = event.self_device_time_total if on_card else event.self_cpu_time_total
            times[group_of(packet)] = times.get(group_of(packet), 0.0) + spent
    return pd.Series(times)


def intensities(recipe: Recipe, device: torch.device) -> pd.DataFrame:
    """Shares in per cent and FLOPs a byte, a row a group; time is of two layers on 128 tokens."""
    groups = by_group(recipe)
    two = recipe.but(model=models.with_layers(recipe.model, 2), seq_len=128)
    times = times_by_group(two, device)
    columns = {
        "FLOPs, %": 100 * groups.flops / groups.flops.sum(),
        "bytes, %": 100 * groups.bytes / groups.bytes.sum(),
        "time, %": 100 * times / times.sum(),
        "FLOPs a byte": (groups.flops + groups.hard) / groups.bytes,
        "exp as 15": (groups.flops + 15 * groups.hard) / groups.bytes,
    }
    return pd.DataFrame(columns).sort_values("FLOPs a byte", ascending=False)


def flops(recipe: Recipe, device: torch.device) -> tuple[int, int]:
    """FLOPs of contractions of a recipe's forward and backward pass, by PyTorch's counter."""
    training = Training(recipe, device)
    with FlopCounterMode(display=False) as forward:
        loss = training.model(**training.batches[0]).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def gradients_at_once() -> tuple[int, int]:
    """Bytes for all of GPT-2 XL's bf16 gradients in one fp32 buffer, and for clip_grad_norm_."""
    with SimulatedGPU() as gpu:
        model = models.build("gpt2-xl", dtype=torch.bfloat16).to("cuda")
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        before = torch.cuda.memory_allocated()
        flat = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        buffer = torch.cuda.memory_allocated() - before
        del flat
        gpu.reset_peak()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return buffer, torch.cuda.max_memory_allocated() - before
