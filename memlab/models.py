"""Named architectures as configs only: no weights are downloaded, every value is the published one.

Memory and speed do not depend on the values of the weights, so models are built from their
config.json with seeded random weights. Each name has a tiny twin, `<name>-tiny`: the same family,
2 layers, a narrow hidden size, the same grouping of attention heads and the same dropout.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from memlab.fields import check_sizes, one_of
from memlab.libraries import hub_reachable, one_line, remembered, with_floats
from memlab.names import FOUR_BITS, hub_name, nearest_model, squeezed

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    Model = str | Path | dict[str, Any] | PretrainedConfig  # what names one: see `Recipe.model`
else:
    Model = Any  # transformers is not imported for a word in a signature

# name -> fields of the published config.json that differ from the defaults of its model_type, and
# `hub`, where that config.json is published
_PUBLISHED = json.loads((Path(__file__).parent / "data" / "models.json").read_text())
# Everything `config` knows by name, with the hub name of the config it stands for.
MODELS: dict[str, str] = {name: fields.pop("hub") for name, fields in _PUBLISHED.items()}
MIRRORS = ("unsloth", "nousresearch")  # owners who publish others' checkpoints, config and all
# Hub names of checkpoints with the same sizes, `also` in the file, and the owners of each name.
_HUBS = {name: (hub, *_PUBLISHED[name].pop("also", ())) for name, hub in MODELS.items()}
# What a checkpoint is for, `task` in the file, where its architecture usually has another task.
_TASKS = {name: fields.pop("task") for name, fields in _PUBLISHED.items() if "task" in fields}
_OWNERS = {name: {hub.lower().split("/")[0] for hub in hubs} for name, hubs in _HUBS.items()}
# Names as people write them -> name; a tiny twin has only its own.
_WRITTEN = {hub: name for name, hubs in _HUBS.items() for hub in (*hubs, name)}
_WRITTEN |= {f"{name}-tiny": f"{name}-tiny" for name in MODELS}
_ALIASES = {squeezed(written): name for written, name in _WRITTEN.items()}
MODELS |= {f"{name}-tiny": f"a tiny twin of {hub}" for name, hub in list(MODELS.items())}

WIDTHS = ("intermediate_size", "hidden_dim", "d_ff", "n_inner")  # of feed-forward layers
# Of layers with experts, one expert and the shared one; Granite 4 has its only one under this name.
EXPERT_WIDTHS = (
    "moe_intermediate_size",
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # how many there are
OF_DELTA_RULE = "linear_key_head_dim"  # configs with Qwen3.5's kind of linear attention have it
OF_SHORT_CONVOLUTIONS = "conv_L_cache"  # configs with LFM2's kind of convolutions have it
# What a config raises, or building its model, whose values do not go together.
MISFITS = (AssertionError, AttributeError, LookupError, TypeError, ZeroDivisionError)
OTHERWISE = "`memlab run` takes a script that trains any other, of images or speech, too"
TASKS = ("sequence-classification", "causal-lm", "masked-lm", "seq2seq-lm")
AUTO_CLASSES = {  # of transformers
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}


def config(model: Model) -> PretrainedConfig:
    """A fresh config of a named model, a config.json (or its folder), a config or a hub name.

    Also of a dictionary with the values of a config.json, `model_type` among them. Of a config that
    nests several models, such as text and vision, it is that of the text model (`left_out`).

    Raises ValueError, in one line, for an unknown name, a file or values that are no model config,
    or a hub name that cannot be had here.
    """
    text = copy.deepcopy(_text_of(published(model)))
    check_sizes(vars(text))
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # of the published weights, not of the architecture
    return text


def published(model: Model) -> PretrainedConfig:
    """The config as it was given or published, not to be changed."""
    name = catalogued(model)
    if isinstance(name, dict):
        return _from_values(name, "model")
    if not isinstance(name, str):
        if not hasattr(type(name), "to_json_string"):
            kind = name.__name__ if isinstance(name, type) else f"of type {type(name).__name__}"
            raise ValueError(f"model is {kind}: allowed are a name and a config, as model.config")
        return name
    if name in MODELS:
        return _of_catalogue(name)
    if Path(name).exists() or name.endswith(".json"):
        return _read_file(Path(name))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _read_hub(name)
    raise ValueError(
        f"unknown model {name!r}{_nearest(name)}: known are {', '.join(_PUBLISHED)} (each also as "
        "<name>-tiny), or a config.json, a folder that save_pretrained wrote, or a hub name like "
        f"org/name; {OTHERWISE}"
    )


def _nearest(name: str) -> str:
    plain = FOUR_BITS.sub("", name)
    if plain != name and (model := _ALIASES.get(squeezed(plain))):
        return f", which is {model!r} in 4 bits: name that, with a lora_rank and base nf4"
    near = nearest_model(name, _WRITTEN)
    return f", the nearest is {_WRITTEN[near]!r}" if near else ""


@functools.cache
def _of_catalogue(name: str) -> PretrainedConfig:
    if name not in _PUBLISHED:
        return twin(name.removesuffix("-tiny"))
    from transformers import CONFIG_MAPPING

    fields = copy.deepcopy(_PUBLISHED[name])
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def catalogued(model: Model) -> str | dict[str, Any] | PretrainedConfig:
    """The name in `MODELS` that a text means: in any case, or its hub name, however it was tuned.

    An owner is its publisher, or one of `MIRRORS`, but for Phi, which a mirror has as a Llama. The
    text itself where it means none, or is a path on this machine; what is no text, too.
    """
    if not isinstance(model, (str, Path)):
        return model
    name = hub_name(str(model))
    entry = _ALIASES.get(squeezed(name), name)
    if name in MODELS or Path(name).exists() or entry not in MODELS:
        return name
    owner, named, _ = name.lower().rpartition("/")
    mirrored = owner in MIRRORS and not entry.startswith("phi")
    return entry if not named or mirrored or owner in _OWNERS.get(entry, ()) else name


def _text_of(given: PretrainedConfig) -> PretrainedConfig:
    if given.is_encoder_decoder:  # its decoder is no model by itself
        return given
    try:
        return given.get_text_config()
    except ValueError:  # several text models
        return given


@remembered
def left_out(model: Model) -> list[str]:
    """What of a nested config `config` leaves out, such as `vision`; empty for most models."""
    given = published(model)
    text = _text_of(given)
    parts = {name: getattr(given, name, None) for name in given.sub_configs}
    left = (n for n, it in parts.items() if not (text is given or it is None or it is text))
    return [name.removesuffix("_config") for name in left]


def settings(model: Model) -> Any:
    """The attributes of `config` to be read, without transformers where they are kept.

    Not to be changed, and not for building: a config, or a namespace with its values by all of
    their names.
    """
    return _namespace(model) if isinstance(model, str) and model in MODELS else config(model)


@functools.cache
def _namespace(name: str) -> SimpleNamespace:
    values, other_names, computed = facts_of(name)
    mapped = {new: values.get(old) for new, old in other_names.items()}
    return SimpleNamespace(**values | mapped | computed)


@remembered
def facts_of(model: Model) -> list[dict[str, Any]]:
    """All values of a config, as its `to_json_string` writes them, and two more dictionaries.

    Further names of values, such as `hidden_size` of GPT-2's `n_embd`; and what a config computes:
    ModernBERT's window is half its local attention.
    """
    full = config(model)
    window = getattr(full, "sliding_window", None)
    computed = {} if window is None else {"sliding_window": window}
    return [json.loads(full.to_json_string(use_diff=False)), dict(full.attribute_map), computed]


def identity(model: Model) -> tuple[str, str]:
    """(the name in `MODELS`, empty for another model; all that it was published with, as JSON)."""
    if isinstance(model, str) and model in MODELS:
        return model, json.dumps(_PUBLISHED[model.removesuffix("-tiny")])
    return "", published(model).to_json_string(use_diff=False)


def _read_file(path: Path) -> PretrainedConfig:
    """The config in a config.json; only its values are used, no code that it names is run."""
    folder, path = path, path / "config.json" if path.is_dir() else path
    if folder.is_dir() and (folder / "adapter_config.json").exists() and not path.exists():
        raise ValueError(f"{folder}: holds an adapter only: name the model that it was trained on")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        advice = "name a config.json, or a folder that save_pretrained wrote"
        raise ValueError(f"{path}: there is no such file: {advice}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({one_line(error)})") from None
    return _from_values(values, path)


def _from_values(values: Any, place: str | Path) -> PretrainedConfig:
    """The config with the values of a config.json; `place` begins the words of an error."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    family = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise ValueError(
            f"{place}: model_type is {family!r}: allowed are those of transformers, which is "
            f"{transformers.__version__} here; a newer one may know it"
        )
    try:
        return CONFIG_MAPPING[family].from_dict(with_floats(values))
    except (StrictDataclassError, ValueError, *MISFITS) as error:
        raise ValueError(f"{place}: not a valid {family} config ({one_line(error)})") from None


def _read_hub(name: str) -> PretrainedConfig:
    from transformers import AutoConfig

    problem = "there is no network"
    for cached_only in (True, False):
        if cached_only or hub_reachable():
            try:
                return AutoConfig.from_pretrained(name, local_files_only=cached_only)
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                problem = problem if cached_only else one_line(error)
    raise ValueError(
        f"there is no folder {name!r}, and its config cannot be had from the hub ({problem})"
        f"{_nearest(name)}: known without it are {', '.join(_PUBLISHED)}, or a config.json; "
        f"{OTHERWISE}"
    )


def twin(model: Model) -> PretrainedConfig:
    """The tiny twin of a model: 2 layers, hidden size 96 to 256, vocabulary of at most 4,096.

    The layers are the first and the next of another kind, where there are kinds. Query heads per
    key-value head, the ratio of the feed-forward width to the hidden size, experts (up to 32),
    dropout, positions and tied embeddings stay as they are.

    Raises ValueError for a family that has no rule for its twin.
    """
    tiny = config(model)
    families = sorted({config(name).model_type for name in _PUBLISHED})
    one_of("the model type of a tiny twin", tiny.model_type, families)
    heads, wide = tiny.num_attention_heads, tiny.hidden_size
    key_value_heads = getattr(tiny, "num_key_value_heads", None) or heads
    grouped = key_value_heads < heads
    new_heads = 2 * (heads // key_value_heads) if grouped else 4
    new_wide = min(new_heads * (16 if new_heads > 4 else 32), 128 if has_experts(tiny) else 256)
    values = {
        "vocab_size": min(tiny.vocab_size, 4096),
        "num_attention_heads": new_heads,
        "num_key_value_heads": 2 if grouped else new_heads,
        "head_dim": new_wide // new_heads,
        **dict.fromkeys(("hidden_size", "pooler_hidden_size"), new_wide),
        "max_window_layers": 2,
    }
    values["vocab_size_per_layer_input"] = values["vocab_size"]
    for name in (*WIDTHS, *EXPERT_WIDTHS, "hidden_size_per_layer_input"):
        values[name] = round((getattr(tiny, name, None) or 0) * new_wide / wide / 16) * 16
    values["d_kv"] = (getattr(tiny, "d_kv", None) or 0) * heads * new_wide // (wide * new_heads)
    if getattr(tiny, "linear_num_key_heads", None):
        per_key = tiny.linear_num_value_heads // tiny.linear_num_key_heads
        values |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * per_key}
        values |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
    if getattr(tiny, "kv_lora_rank", None):  # DeepSeek's attention, as GLM-4.7-Flash has it
        rope = values["head_dim"]
        for name in ("qk_nope_head_dim", "v_head_dim", "qk_head_dim"):
            values[name] = rope * getattr(tiny, name) // tiny.qk_rope_head_dim
        for name in ("q_lora_rank", "kv_lora_rank"):
            values[name] = getattr(tiny, name) * new_wide // wide
    for name in EXPERTS:
        values[name] = min(getattr(tiny, name, None) or 0, 32)
    lists = by_layer(tiny)
    layers = list(zip(*lists.values(), strict=True))
    other = next((i for i, layer in enumerate(layers) if layer != layers[0]), 0)
    values |= {name: [value[0], value[other]] for name, value in lists.items()}
    if not getattr(tiny, "is_heterogeneous", False):
        return resized(with_layers(tiny, 2), **values)
    # Gemma 4: heads of layers with full attention are wider.
    widths = [tiny.per_layer_config[layer].head_dim for layer in (0, other)]
    tiny.per_layer_config = None
    small = resized(with_layers(tiny, 2), **values)
    small.per_layer_config = {1: {"head_dim": small.head_dim * widths[1] // widths[0]}}
    return small


def resized(model: Model, **values: Any) -> PretrainedConfig:
    """A copy of a config with these values, as far as the architecture has such fields.

    Special tokens beyond a smaller vocabulary become its last entry; factors of single rotary
    frequencies become as many as there are then.
    """
    small = config(model)
    for name, value in values.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(small, name, None)
        if isinstance(token, list):
            setattr(small, name, [min(number, small.vocab_size - 1) for number in token])
        elif token is not None and token >= small.vocab_size:
            setattr(small, name, small.vocab_size - 1)
    rope = getattr(small, "rope_parameters", None) or {}
    for name in {"short_factor", "long_factor"} & rope.keys():
        head = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
        pairs = int(head * rope.get("partial_rotary_factor", 1)) // 2
        rope[name] = (rope[name] * pairs)[:pairs]
    return small


def with_layers(model: Model, layers: int) -> PretrainedConfig:
    """A copy of a config with so many layers (in an encoder and in a decoder).

    Of another number than its own none takes the keys and values of an earlier one.
    """
    full = config(model)
    values = {name: (value * layers)[:layers] for name, value in by_layer(full).items()}
    apart = {} if layers == full.num_hidden_layers else {"num_kv_shared_layers": 0}
    return resized(full, num_hidden_layers=layers, num_decoder_layers=layers, **values, **apart)


def by_layer(full: PretrainedConfig) -> dict[str, list[Any]]:
    """The lists of a config that have one entry a layer."""
    usual = type(full)()  # says which lists have one, and which just have that length

    def fits(config: PretrainedConfig, value: object) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers

    return {
        name: value
        for name, value in vars(full).items()
        if fits(full, value) and (not vars(usual).get(name) or fits(usual, vars(usual)[name]))
    }


def tasks(model: Model) -> tuple[str, ...]:
    """The tasks of `TASKS` that an architecture has, first what the checkpoint is for, if said."""
    own = _TASKS.get(model.removesuffix("-tiny")) if isinstance(model, str) else None
    return tuple(sorted(_tasks(model), key=lambda task: task != own))


@remembered
def _tasks(model: Model) -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto

    values = config(model)
    family = values.model_type
    names = {
        "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    has = [task for task, families in names.items() if family in families]
    if "seq2seq-lm" in has:
        # Its classifier looks for end-of-sequence tokens in the input, which dummy data lacks.
        return ("seq2seq-lm",)
    if "masked-lm" in has:  # an encoder; as a decoder it would be another architecture
        return tuple(t for t in ("sequence-classification", "masked-lm") if t in has)
    if values.is_encoder_decoder or not has:  # a decoder alone would be another architecture
        raise ValueError(
            f"model type {family!r} has none of the tasks {', '.join(TASKS)}: "
            "`memlab run` takes a script that trains it"
        )
    return tuple(has)


def default_task(model: Model) -> str:
    """The usual task of an architecture: classification for encoders, else language modelling."""
    return tasks(model)[0]


def max_length(model: Model) -> int | None:
    """The longest sequence in tokens, None where positions are only relative (T5, DeBERTa-v3).

    Rotary positions can be stretched. A `rope_type` of linear or dynamic does so by its `factor`
    on top of `max_position_embeddings`; yarn from `original_max_position_embeddings` on, which
    many a config.json leaves as the maximum; llama3 and longrope have it in the maximum already
    (transformers, modeling_rope_utils.py; so does vLLM derive its longest sequence).
    """
    values = settings(model)
    if not getattr(values, "position_biased_input", True):
        return None
    longest = getattr(values, "max_position_embeddings", None)
    longest = None if longest == -1 else longest  # XLNet says so that there is no end
    rope = getattr(values, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("linear", "dynamic"):
        longest = round(longest * rope["factor"])
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, round(original * rope["factor"]))
    if longest is not None and values.model_type in ("roberta", "xlm-roberta", "camembert"):
        longest -= values.pad_token_id + 1  # positions are counted from the padding index on
    return longest


def has_experts(model: Model) -> bool:
    """Whether the architecture is a mixture of experts."""
    return any(getattr(settings(model), name, None) for name in EXPERTS)


def build(
    model: Model,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    attention: str = "eager",
    seed: int = 0,
) -> PreTrainedModel:
    """A model with seeded random weights, in train mode, without a key-value cache.

    model: anything that `config` takes. dtype: of parameters and buffers, None for fp32.
    attention: an attention implementation of transformers. The weights are where the current
    default device says; inside a FakeTensorMode nothing is allocated. Sets the global torch seed.

    Raises ValueError for a task or an attention that the architecture does not have.
    """
    import torch
    import transformers

    values = config(model)
    allowed = tasks(model)
    task = allowed[0] if task is None else task
    if task not in allowed:
        raise ValueError(
            f"task {task!r} is not one of model type {values.model_type!r}: "
            f"allowed are {', '.join(allowed)}"
        )
    values.use_cache = False
    if task == "sequence-classification":
        values.problem_type = "single_label_classification"  # else DeBERTa looks at the labels
        if values.pad_token_id is None:  # a decoder needs one to find each last token
            ends = values.eos_token_id or 0
            values.pad_token_id = ends[0] if isinstance(ends, list) else ends
    if task == "seq2seq-lm" and getattr(values, "decoder_start_token_id", None) is None:
        values.decoder_start_token_id = values.pad_token_id or 0  # as T5's checkpoints have it
    torch.manual_seed(seed)
    try:
        built = getattr(transformers, AUTO_CLASSES[task]).from_config(
            values, dtype=dtype or torch.float32, attn_implementation=attention
        )
    except MISFITS as error:  # such as padding beyond the vocabulary, or no heads
        raise ValueError(
            f"not a valid {values.model_type} config ({type(error).__name__}: {one_line(error)})"
        ) from None
    except (ValueError, ImportError) as error:  # from here on only the attention can be wrong
        raise ValueError(
            f"attention {attention!r} cannot be had for model type {values.model_type!r}: "
            f"allowed is eager ({one_line(error)})"
        ) from None
    if task == "causal-lm" and getattr(built, "loss_type", None) is None:
        built.loss_type = "ForCausalLM"  # what transformers takes anyway, after a warning (GPT-2)
    if task == "seq2seq-lm" and _has_own_head(values):
        built.lm_head.weight = torch.nn.Parameter(built.lm_head.weight.detach().clone())
        del built.all_tied_weights_keys["lm_head.weight"]
    return built.train()


def skeleton(model: Model, task: str | None = None, attention: str = "eager") -> PreTrainedModel:
    """As `build`, of weights that have shapes only."""
    import torch

    with torch.device("meta"):
        return build(model, task, attention=attention)


def _has_own_head(values: PretrainedConfig) -> bool:
    """Whether a checkpoint of T5's family has a head that is not its embedding: from T5 1.1 on.

    Their configs say `tie_word_embeddings` of all, because encoder and decoder share embeddings.
    What a 1.1 config.json says is kept as `scale_decoder_outputs`; mT5 and umT5 are all 1.1.
    """
    scaled = getattr(values, "scale_decoder_outputs", True)
    return values.model_type in ("mt5", "umt5") or not scaled


def active_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """(all parameters, those that one token meets) of a mixture of experts with this config."""
    named = list(skeleton(config).named_parameters())
    total = sum(p.numel() for _, p in named)
    experts = sum(p.numel() for name, p in named if ".experts." in name)
    there_are = next(n for name in EXPERTS if (n := getattr(config, name, None)))
    return total, total - experts + experts * config.num_experts_per_tok // there_are
