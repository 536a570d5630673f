"""Code to paste for a recipe: a training script, and what to install.

A script needs no memlab, and `memlab run` predicts of it what `simulate` predicts of its recipe.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers.pytorch_utils import Conv1D

from memlab import models
from memlab.fields import one_of
from memlab.spec.combinations import check_trainer
from memlab.spec.optimizers import OPTIMIZERS, is_of_bitsandbytes, library_of
from memlab.spec.recipe import (
    QUANTIZED,
    Recipe,
)
from memlab.workloads import training
from memlab.workloads.losses import CHUNK
from memlab.workloads.quantized import HEADS

APIS = ("trainer", "accelerate")
LINE = 88  # the usual width of a formatted line

# What a script may use, by the module that it is imported from, in the order in which ruff sorts
# it, and the oldest release of its package that has it (pyproject.toml says the same of memlab).
NAMES = {
    "accelerate": ["Accelerator"],
    "datasets": ["Dataset"],
    "itertools": ["chain"],
    "peft": ["LoraConfig", "get_peft_model", "prepare_model_for_kbit_training"],
    "torch.utils.checkpoint": ["checkpoint"],
    "torch.utils.data": ["DataLoader"],
    "transformers": [
        "Adafactor",
        "AutoModelForCausalLM",
        "AutoModelForMaskedLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForSequenceClassification",
        "AutoTokenizer",
        "BitsAndBytesConfig",
        "DataCollatorForLanguageModeling",
        "DataCollatorForSeq2Seq",
        "DataCollatorWithPadding",
        "Trainer",
        "TrainingArguments",
        "default_data_collator",
    ],
    "transformers.modeling_outputs": ["CausalLMOutput"],
    "types": ["MethodType"],
}
OLDEST = {
    "accelerate": "1.12",
    "bitsandbytes": "0.50",
    "datasets": "4.0",
    "peft": "0.21",
    "torch": "2.11",
    "transformers": "5.23",
}

COLLATORS = {
    "sequence-classification": "DataCollatorWithPadding(tokenizer)",
    "causal-lm": "DataCollatorForLanguageModeling(tokenizer, mlm=False)",
    "masked-lm": "DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)",
    "seq2seq-lm": "DataCollatorForSeq2Seq(tokenizer)",
}
LONGEST_LINE = 72  # behind `    optimizer = `
ON_HOST = """torchao.optim.CPUOffloadOptimizer(
        weights,
        torch.optim.AdamW,{}
        lr=LEARNING_RATE,
        fused=True,
    )"""

# Before torch is imported, as PyTorch's documentation asks for.
SEGMENTS = """\
import os

# Segments of PyTorch's allocator grow where they are; it is read when CUDA starts.
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

"""

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("memlab.export", ""),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)


def training_script(recipe: Recipe, api: str = "trainer") -> str:
    """A complete script that trains what `recipe` says on one GPU.

    api: `trainer`, transformers' Trainer, or `accelerate`, a plain loop. The data are rows of one
    word, at a marked place for the reader's own; whatever a recipe does not say, such as the
    learning rate, is a usual value.

    Raises ValueError, in one line, for another api, for a model without weights to load (a config,
    a tiny twin), and for what cannot be said: the Trainer always drops gradients, takes the
    model's own loss and steps after the backward pass, transformers quantizes in blocks of 64
    weights and leaves parts of some families, such as T5's, in fp32 where all else is in fp16.
    """
    one_of("api", api, APIS)
    if api == "trainer":
        check_trainer(recipe, otherwise=", or api accelerate")
    if recipe.packed:
        raise ValueError(
            "packed is True: a script's rows are one text each, allowed is False; TRL's "
            "SFTTrainer packs with packing=True"
        )
    values = _values(recipe, api)
    body = _TEMPLATES.get_template("script.jinja").render(values)
    library = "transformers' Trainer" if api == "trainer" else "Accelerate"
    first = SEGMENTS if recipe.expandable_segments else ""
    return f'"""Trains a model on one GPU with {library}."""\n\n{first}{_imports(body)}\n\n{body}'


def api_of(recipe: Recipe, asked: str = "trainer") -> str:
    """The api that trains a recipe: the one asked for, accelerate where the Trainer cannot."""
    try:
        check_trainer(recipe)
    except ValueError:
        return "accelerate"
    return asked


def pip_line(recipe: Recipe, api: str = "trainer") -> str:
    """What installs the packages of `training_script(recipe, api)`, as one command."""
    used = {module.split(".")[0] for module in _used(training_script(recipe, api))}
    used |= {"accelerate"}  # which the Trainer asks for
    if recipe.base in QUANTIZED or is_of_bitsandbytes(recipe.optimizer):
        used |= {"bitsandbytes"}  # which transformers imports
    wanted = [f'"{name}>={OLDEST[name]}"' for name in sorted(used & OLDEST.keys())]
    wanted += ["torchao"] * ("torchao" in used)
    return " ".join(["pip install", *wanted])


def _hub_name(recipe: Recipe) -> str:
    """What `from_pretrained` takes."""
    name = recipe.model
    if not isinstance(name, str):
        raise ValueError(
            f"model is a {models.settings(name).model_type} config: a script loads weights, "
            "allowed are names of memlab.models.MODELS, hub names and folders"
        )
    if name in models.MODELS:
        if name.endswith("-tiny"):
            raise ValueError(
                f"model is {name!r}, whose weights are nowhere: allowed are names without -tiny, "
                "hub names and folders"
            )
        return models.MODELS[name]
    return str(Path(name).parent) if name.endswith(".json") else name


def _optimizer_call(optimizer: str) -> str:
    """The line of a plain loop that makes an optimizer, as ruff would break it."""
    name, settings = OPTIMIZERS[optimizer].made_by, OPTIMIZERS[optimizer].settings
    name = name.rpartition(".")[2] if library_of(optimizer) == "transformers" else name
    chosen = [f"{field}={value}" for field, value in settings.items()]
    arguments = ["weights", "lr=LEARNING_RATE", *chosen]
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= LONGEST_LINE:
        return line
    lines = "".join(f"        {argument},\n" for argument in arguments)
    return f"{name}(\n{lines}    )"


def _values(recipe: Recipe, api: str) -> dict:
    """What the template asks for."""
    config = models.config(recipe.model)
    task, lora, targets = recipe.task, recipe.lora_rank, recipe.lora_targets
    decoder = not config.is_encoder_decoder and "masked-lm" not in models.tasks(config)
    blocks = task in ("causal-lm", "masked-lm") and not recipe.padded
    optimizer = _optimizer_call(recipe.optimizer)
    meaning_of_optimizer = OPTIMIZERS[recipe.optimizer].meaning
    if recipe.optimizer_offload != "none":
        freed = recipe.optimizer_offload == "gradients"
        optimizer = ON_HOST.format(f"\n        offload_gradients={freed}," * freed)
        meaning_of_optimizer = "weights, gradients and states on the host, which does the step"
    dtype = training.stored_as(recipe)
    skeleton = models.skeleton(config, task)
    linear = (m for m in skeleton.modules() if isinstance(m, (torch.nn.Linear, Conv1D)))
    stays = sorted(skeleton._keep_in_fp32_modules or ())
    if stays and dtype == torch.float16 and recipe.base == "none":
        raise ValueError(
            f"precision is {recipe.precision!r}: from_pretrained leaves {', '.join(stays)} of "
            f"{recipe.model_name} in fp32, allowed are fp32, fp16-amp, bf16-amp, bf16"
        )
    return {
        "recipe": recipe,
        "quantized": recipe.base in QUANTIZED,
        "api": api,
        "name": _hub_name(recipe),
        "task": task,
        "classes": config.num_labels,
        "decoder": decoder,
        "finds_last_token": decoder and task == "sequence-classification",
        "blocks": blocks,
        "chunk": CHUNK,
        "drops_mask": not recipe.padded and task != "causal-lm",
        "collator": "default_data_collator" if blocks and decoder else COLLATORS[task],
        "auto": models.AUTO_CLASSES[task],
        "dtype": str(dtype).removeprefix("torch."),
        "meaning_of_dtype": _meaning_of_dtype(recipe),
        "autocast": recipe.precision.removesuffix("-amp") if "amp" in recipe.precision else "",
        "optimizer": optimizer,
        "meaning_of_optimizer": meaning_of_optimizer,
        "peft_task": training.PEFT_TASKS.get(task),
        "targets": targets if isinstance(targets, str) else list(targets),
        "fan_in_fan_out": lora and isinstance(next(linear), Conv1D),
        "frozen": _frozen(recipe, skeleton) if recipe.freeze and not lora else [],
        "head_to_cast": _head_to_cast(recipe, skeleton),
    }


def _meaning_of_dtype(recipe: Recipe) -> str:
    if recipe.base in QUANTIZED:
        return "of products, and of what is not quantized"
    if recipe.base == "half":
        return "frozen weights; adapters are fp32, products by autocast"
    if recipe.precision in ("fp16", "bf16"):
        return "weights, gradients, states; no autocast"
    if recipe.precision in training.AUTOCAST:
        return "weights, gradients, states; products by autocast"
    return "weights, gradients, states, products"


def _head_to_cast(recipe: Recipe, model: torch.nn.Module) -> str:
    """The name of a head that is trained in fp32 beside a base in fp16, if there is one."""
    loaded = recipe.base == "half" or recipe.base in QUANTIZED and not recipe.upcast
    scaled = recipe.precision == "fp16-amp" and training.stored_as(recipe) == torch.float16
    if not loaded or not scaled:
        return ""
    return next((name for name in HEADS if hasattr(model, name)), "")


def _frozen(recipe: Recipe, model: Any) -> list[str]:
    """The largest modules that a recipe freezes, as Python says them of `model`."""
    training.freeze(model, recipe.freeze)  # refuses what the model does not have
    left = {weight for weight in model.parameters() if not weight.requires_grad}
    parts = []

    def is_left(module: torch.nn.Module) -> bool:
        return left.issuperset(module.parameters())

    for path, module in model.named_modules():  # a module before those in it
        part = _in_python(path)
        if isinstance(module, torch.nn.ModuleList):  # its first layers are one part
            module = torch.nn.ModuleList(itertools.takewhile(is_left, module))
            part = f"{part}[:{len(module)}]"
        weights = set(module.parameters())
        if weights and is_left(module):
            parts.append(part)
            left -= weights
    return parts


def _in_python(path: str) -> str:
    """`h.0.mlp` as `model.h[0].mlp`."""
    return "model." + re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", path)


def _used(code: str) -> dict[str, list[str]]:
    """Module -> the names that code takes from it; of some modules none, the module itself."""
    words = set(re.findall(r"\w+", re.sub(r"#.*", "", code)))
    used = {module: [name for name in names if name in words] for module, names in NAMES.items()}
    used = {module: names for module, names in used.items() if names}
    return used | {
        name: [] for name in ("bitsandbytes", "torch", "torchao.optim") if f"{name}." in code
    }


def _imports(code: str) -> str:
    """The import lines of code, sorted as ruff and isort sort them, as `NAMES` is."""
    plain, first, rest = [], [], []
    for module, names in _used(code).items():
        line = f"from {module} import {', '.join(names)}"
        if len(line) > LINE:
            listed = "".join(f"    {name},\n" for name in names)
            line = f"from {module} import (\n{listed})"
        if not names:
            plain.append(f"import {module}")
        elif module in ("itertools", "types"):
            first.append(line)
        else:
            rest.append(line)
    return "\n".join([*first, *([""] if first else []), *plain, *rest])
