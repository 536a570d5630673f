"""PEFT's comparison of fine-tuning methods: Llama-3.2-3B on MetaMathQA, on an L40S.

Source: huggingface/peft, method_comparison/MetaMathQA (Apache-2.0). run.py is the loop;
results/*.json hold the figures, the versions and all settings of each run.

Assumptions, written down before any prediction was compared:

- **One length for all runs.** All runs see the same batches of 4 sequences, but their lengths are
  not published. The length of the longest batch, 698 tokens, was read off one run, LoRA of rank 32.
  That run is therefore no evidence for the prediction; the others are.
- **The longest batch comes after an emptied cache.** The loop sorts 80 samples from long to short
  and empties the cache after every tenth step. So the peak is that of one step of the longest
  batch, after two short ones and `empty_cache()`. Outputs, loss and batch of the previous step are
  alive until their names are bound again. A second long batch, of unknown length, is left out.
- **Batches carry a padding mask**, attention is transformers' default (sdpa), and `use_cache` is
  on, as in the config, so that the outputs hold keys and values.
- **The weights are loaded as by `from_pretrained`** onto a device, which first allocates and frees
  one block of the model's size.
- **The time is that of a step of mean length.** The results give the seconds and the tokens of all
  steps: 210 tokens per text, with its end. The texts of a bucket have nearly one length. Padding is
  left out, and so is the host's work between steps.
- **The evaluations in between need less than a step**, and the learning-rate schedule nothing.
"""

import importlib
import inspect
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.spec.recipe import Recipe
from memlab.workloads.training import import_peft

SHORT = 100  # approximate length in tokens of a bucket's last batches


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The footprint of the longest batch's step, with the seconds of a step of mean length.

    `run.settings` has three keys. `adapter`: the values of a PeftConfig, or None. `training`: the
    values of the comparison's TrainConfig that change memory. `tokens_of_sequence`: the mean
    length.
    """
    peft, recipe, told = import_peft(), Recipe(**run.recipe), run.settings["training"]
    importlib.import_module("peft.optimizers")  # outside the simulation, as all imports
    with SimulatedGPU(card) as gpu:
        torch.nn.Linear(1, 1).to("cuda")  # run.py does so to measure the memory of an empty GPU
        model = loaded(recipe)
        adapter = run.settings["adapter"] and config_of(run.settings["adapter"])
        if adapter:
            cast = told["autocast_adapter_dtype"]
            try:
                model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=cast)
            except LookupError:  # AdaMSS clusters the rows of each weight, which has no data here
                why = "is built from values of weights, which large ones on the host do not have"
                raise ValueError(f"{adapter.peft_type} {why}") from None
        optimizer = make_optimizer(model, told["optimizer_type"], told["optimizer_kwargs"])
        if adapter:
            with model.disable_adapter():
                # run.py evaluates the base model here. On leaving, peft makes the whole adapter
                # trainable again.
                pass
        model.train()

        outputs = loss = None
        # Two short steps, the longest one (memory), and one of mean length (time).
        lengths = SHORT, SHORT, recipe.seq_len, run.settings["tokens_of_sequence"]
        for number, length in enumerate(lengths, 1):
            if number == 3:
                torch.cuda.empty_cache()
                gpu.reset_peak()
            tokens = torch.zeros(recipe.batch_size, length, dtype=torch.long, device="cuda")
            mask = torch.ones_like(tokens)
            mask[0, -1] = 0  # some padding, because transformers drops a mask that hides nothing
            batch = {"input_ids": tokens, "attention_mask": mask}
            batch["labels"] = tokens.clone()
            counted = batch["attention_mask"].sum().item()
            optimizer.zero_grad()
            outputs = model(**batch, num_items_in_batch=counted)
            loss = outputs.loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
            optimizer.step()
            if adapter and adapter.peft_type in ("ADALORA", "ADAMSS"):
                model.base_model.update_and_allocate(number)
            if number == 3:
                longest = gpu.footprint
        return replace(longest, step_time=gpu.footprint.step_time)


def loaded(recipe: Recipe):
    """The model in bf16 on the GPU, after transformers' warm-up of the allocator."""
    config = models.config(recipe.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    warm_up = torch.empty(numbers, dtype=torch.bfloat16, device="cuda")
    del warm_up
    return model.to("cuda")


def config_of(values: dict):
    """The PeftConfig with these values; values that the installed peft lacks are ignored."""
    mapping = import_peft().PEFT_TYPE_TO_CONFIG_MAPPING
    known = inspect.signature(mapping[values["peft_type"]]).parameters
    return mapping[values["peft_type"]](**{k: v for k, v in values.items() if k in known})


def make_optimizer(model, kind: str, settings: dict):
    """An optimizer of torch.optim by its name, or one of PEFT's three."""
    if hasattr(torch.optim, kind):
        return getattr(torch.optim, kind)(model.parameters(), **settings)
    optimizers = import_peft().optimizers
    if kind == "lora-fa":
        return optimizers.create_lorafa_optimizer(model, **settings)
    make = {
        "lora+": optimizers.create_loraplus_optimizer,
        "riemannian": optimizers.create_riemannian_optimizer,
    }[kind]
    return make(model, optimizer_cls=torch.optim.AdamW, **settings)
