"""Three small models that have learnt something, to be rounded, pruned and asked again."""

import copy
import statistics
from collections.abc import Callable

import torch

from memlab import models
from memlab.book.lessons import shuffled_blocks, small_config, train_on

TINY = "llama-3.2-1b-tiny"  # its twin runs on any machine
Change = Callable[[torch.Tensor], torch.Tensor]


def error(x: torch.Tensor, back: torch.Tensor) -> float:
    """Root mean square error, relative to the numbers."""
    return ((x - back).norm() / x.norm()).item()


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The linear layers by their names, without the head."""
    modules = model.model.named_modules()
    return {n: m for n, m in modules if isinstance(m, torch.nn.Linear)}


class Patients:
    """Small Llamas that have learnt this book's pages, one for each of three seeds.

    `models` are the three, `base` their losses on text that they have not seen; `seen` is what
    they were trained on, in blocks of 32 tokens.
    """

    def __init__(self, device: torch.device, layers: int = 1, steps: int = 150, rate: float = 5e-3):
        tokenizer, ids = shuffled_blocks(length=32)
        ids = ids.to(device)
        self.unseen, self.seen = ids[:48], ids[48:]
        sizes = dict(vocab_size=len(tokenizer), num_hidden_layers=layers, head_dim=32)
        sizes |= dict(num_attention_heads=4, num_key_value_heads=4)
        config = small_config(TINY, intermediate_size=256, **sizes)
        self.models = []
        for seed in range(3):
            fresh = models.build(config, attention="sdpa", seed=seed).to(device)
            self.models.append(self.taught(fresh, steps, rate, seed))
        self.base = [self.loss(model) for model in self.models]

    def taught(self, model: torch.nn.Module, steps: int, rate: float, seed: int) -> torch.nn.Module:
        """The model after some more steps, under a learning rate of one cycle."""
        how = dict(lr=rate, betas=(0.9, 0.95), fused=True)
        optimizer = torch.optim.AdamW(model.parameters(), **how)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR
        rates = one_cycle(optimizer, rate, steps, pct_start=0.1)
        torch.manual_seed(seed)
        chosen = torch.randint(len(self.seen), (steps, 12))
        train_on(model, optimizer, [self.seen[rows] for rows in chosen], rates)
        return model

    @torch.no_grad()
    def loss(self, model: torch.nn.Module) -> float:
        """On the unseen text."""
        return model(input_ids=self.unseen, labels=self.unseen).loss.item()

    def harm(self, change: Callable[[torch.nn.Module], torch.nn.Module]) -> list[float]:
        """What a change of a model adds to the loss, for each seed."""
        losses = [self.loss(change(model)) for model in self.models]
        return [loss - b for loss, b in zip(losses, self.base, strict=True)]

    def harm_of(self, rounding: Change) -> list[float]:
        """What a change of every linear weight adds to the loss, for each seed."""
        return self.harm(lambda model: with_weights(model, lambda w, _: rounding(w)))

    def harm_with_inputs(self, method: Callable, bits: int) -> list[float]:
        """The same for a method that sees what 64 blocks of text give to each layer."""

        def change(model: torch.nn.Module) -> torch.nn.Module:
            known = inputs_of(model, self.seen[:64])
            return with_weights(model, lambda w, name: method(w, known[name], bits))

        return self.harm(change)


def with_weights(model: torch.nn.Module, change: Callable) -> torch.nn.Module:
    """A copy with changed linear weights; change: of a weight and its layer's name."""
    model = copy.deepcopy(model)
    for name, layer in linears(model).items():
        layer.weight.data = change(layer.weight.data, name)
    return model


def inputs_of(model: torch.nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each linear layer gets to see of some rows of token ids, as [tokens, inputs]."""
    found, hooks = {}, []
    for name, layer in linears(model).items():

        def note(layer: torch.nn.Module, given: tuple, name: str = name) -> None:
            found[name] = given[0].flatten(0, -2)

        hooks.append(layer.register_forward_pre_hook(note))
    with torch.no_grad():
        model(input_ids=rows)
    for hook in hooks:
        hook.remove()
    return found


def mean_and_spread(values: list[float]) -> str:
    middle, spread = statistics.fmean(values), statistics.stdev(values)
    return f"{middle:+z.4f} ± {spread:.4f}"
