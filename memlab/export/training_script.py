"""Training scripts made from recipes, and the pip command that installs what they need.

A script is rendered from `script.jinja`, does not import memlab, and passes ruff's check and
format. `memlab run` predicts for it what `simulate` predicts for its recipe.

Known limitation: a script trains on one GPU.
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

# Module -> the names that a script may import from it, in the order in which ruff sorts imports.
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
# Package -> the oldest release that has these names: memlab's own lower bounds in pyproject.toml.
OLDEST = {
    "accelerate": "1.12",
    "bitsandbytes": "0.50",
    "datasets": "4.0",
    "peft": "0.21.2",
    "torch": "2.11",
    "transformers": "5.23",
}

COLLATORS = {
    "sequence-classification": "DataCollatorWithPadding(tokenizer)",
    "causal-lm": "DataCollatorForLanguageModeling(tokenizer, mlm=False)",
    "masked-lm": "DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)",
    "seq2seq-lm": "DataCollatorForSeq2Seq(tokenizer)",
}
LONGEST_LINE = 72  # columns left of `LINE` after `    optimizer = `
ON_HOST = """torchao.optim.CPUOffloadOptimizer(
        weights,
        torch.optim.AdamW,{}
        lr=LEARNING_RATE,
        fused=True,
    )"""

# Comes before `import torch`, as PyTorch's documentation asks.
SEGMENTS = """\
import os

# Lets segments of PyTorch's allocator grow in place; it is read when CUDA starts.
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
    """A complete script that trains `recipe` on one GPU.

    api: `trainer` for transformers' Trainer, `accelerate` for a plain loop.

    The data are rows of one repeated word, at a place marked for the user's own. Whatever a recipe
    does not say, such as the learning rate, has a usual value.

    Raises ValueError in one line for another api, and for a model without weights to load (a
    config, a tiny twin). The same goes for what a script cannot do. The Trainer always drops
    gradients, takes the model's own loss, keeps states on the GPU and steps after the backward
    pass. transformers leaves parts of some families, such as T5's, in fp32 where all else is in
    fp16. Rows hold one text each, so `packed` is refused. So are several ranks.
    """
    one_of("api", api, APIS)
    if api == "trainer":
        check_trainer(recipe, otherwise=", or api accelerate")
    if recipe.packed:
        raise ValueError(
            "packed is True: each row of a script is one text, allowed is False; TRL's "
            "SFTTrainer packs with packing=True"
        )
    if recipe.ranks > 1:
        raise ValueError(f"ranks is {recipe.ranks}: a script trains on one GPU, allowed is 1")
    values = _values(recipe, api)
    body = _TEMPLATES.get_template("script.jinja").render(values)
    library = "transformers' Trainer" if api == "trainer" else "Accelerate"
    first = SEGMENTS if recipe.expandable_segments else ""
    return f'"""Trains a model on one GPU with {library}."""\n\n{first}{_imports(body)}\n\n{body}'


def api_of(recipe: Recipe, asked: str = "trainer") -> str:
    """The api for a recipe: `asked`, or accelerate for what the Trainer does not do."""
    try:
        check_trainer(recipe)
    except ValueError:
        return "accelerate"
    return asked


def pip_line(recipe: Recipe, api: str = "trainer") -> str:
    """The pip command that installs the packages of `training_script(recipe, api)`."""
    used = {module.split(".")[0] for module in _used(training_script(recipe, api))}
    used |= {"accelerate"}  # the Trainer needs it, too
    if recipe.base in QUANTIZED or is_of_bitsandbytes(recipe.optimizer):
        used |= {"bitsandbytes"}  # imported by transformers, not always by the script
    wanted = [f'"{name}>={OLDEST[name]}"' for name in sorted(used & OLDEST.keys())]
    wanted += ["torchao"] * ("torchao" in used)
    wanted += ["flash-attn"] * (recipe.attention == "flash_attention_2")  # imported by transformers
    return " ".join(["pip install", *wanted])


def _hub_name(recipe: Recipe) -> str:
    """The hub name or folder for `from_pretrained`.

    Raises ValueError for a config and for a tiny twin, which have no weights.
    """
    name = recipe.model
    if not isinstance(name, str):
        raise ValueError(
            f"model is a {models.settings(name).model_type} config: a script loads weights, "
            "allowed are names of memlab.models.MODELS, hub names and folders"
        )
    if name in models.MODELS:
        if name.endswith("-tiny"):
            raise ValueError(
                f"model is {name!r}, which has no published weights: allowed are names without "
                "-tiny, hub names and folders"
            )
        return models.MODELS[name]
    return str(Path(name).parent) if name.endswith(".json") else name


def _optimizer_call(optimizer: str) -> str:
    """The call that makes an optimizer in a plain loop, broken into lines as ruff would."""
    name, settings = OPTIMIZERS[optimizer].made_by, OPTIMIZERS[optimizer].settings
    # A class of transformers is imported by name, any other is written with its path.
    name = name.rpartition(".")[2] if library_of(optimizer) == "transformers" else name
    chosen = [f"{field}={value}" for field, value in settings.items()]
    arguments = ["weights", "lr=LEARNING_RATE", *chosen]
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= LONGEST_LINE:
        return line
    lines = "".join(f"        {argument},\n" for argument in arguments)
    return f"{name}(\n{lines}    )"


def _values(recipe: Recipe, api: str) -> dict:
    """The variables of the template."""
    config = models.config(recipe.model)
    task, lora, targets = recipe.task, recipe.lora_rank, recipe.lora_targets
    # Encoders are the architectures that have a masked-lm task.
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
    # from_pretrained keeps these modules in fp32 if the model is loaded in fp16 (transformers,
    # modeling_utils.py, PreTrainedModel). memlab's own training does so under a base only.
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
        # A causal classifier reads each text's last token, and finds it by the padding.
        "finds_last_token": decoder and task == "sequence-classification",
        "blocks": blocks,
        "chunk": CHUNK,
        # Collators always add a mask. Without padding, the recipe has none, and it takes memory.
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
    """The name of a classification head to cast to fp32 next to a base in fp16, or empty.

    The head is trained, and PyTorch's gradient scaler refuses gradients in fp16.
    """
    loaded = recipe.base == "half" or recipe.base in QUANTIZED and not recipe.upcast
    scaled = recipe.precision == "fp16-amp" and training.stored_as(recipe) == torch.float16
    if not loaded or not scaled:
        return ""
    return next((name for name in HEADS if hasattr(model, name)), "")


def _frozen(recipe: Recipe, model: Any) -> list[str]:
    """The largest modules that a recipe freezes, as Python expressions on `model`."""
    training.freeze(model, recipe.freeze)  # raises ValueError for a part that the model lacks
    left = {weight for weight in model.parameters() if not weight.requires_grad}
    parts = []

    def is_left(module: torch.nn.Module) -> bool:
        return left.issuperset(module.parameters())

    # named_modules gives a module before its children, so the largest frozen ones are found first.
    for path, module in model.named_modules():
        part = _in_python(path)
        if isinstance(module, torch.nn.ModuleList):  # its frozen first layers are one slice
            module = torch.nn.ModuleList(itertools.takewhile(is_left, module))
            part = f"{part}[:{len(module)}]"
        weights = set(module.parameters())
        if weights and is_left(module):
            parts.append(part)
            left -= weights
    return parts


def _in_python(path: str) -> str:
    """Turn `h.0.mlp` into `model.h[0].mlp`."""
    return "model." + re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", path)


def _used(code: str) -> dict[str, list[str]]:
    """Module -> the names that code imports from it; none for a module that is imported whole."""
    words = set(re.findall(r"\w+", re.sub(r"#.*", "", code)))
    used = {module: [name for name in names if name in words] for module, names in NAMES.items()}
    used = {module: names for module, names in used.items() if names}
    return used | {
        name: [] for name in ("bitsandbytes", "torch", "torchao.optim") if f"{name}." in code
    }


def _imports(code: str) -> str:
    """The import lines of code in the order of ruff's isort rules, in which `NAMES` is sorted."""
    plain, first, rest = [], [], []  # `import x`; the standard library; other packages
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
