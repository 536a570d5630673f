"""The catalogue of models: published configs without weights, and what can be built from them.

Memory and speed do not depend on the values of the weights. Models are therefore built from their
config.json with seeded random weights, and nothing is downloaded for a model of the catalogue.
Every value is the published one. Each name has a tiny twin, `<name>-tiny`: the same family with
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

    Model = str | Path | dict[str, Any] | PretrainedConfig  # the ways to name one: `Recipe.model`
else:
    Model = Any  # an annotation alone does not justify importing transformers

# name -> the fields of the published config.json that differ from the defaults of its model_type.
# `hub` is the hub name under which that config.json is published.
_PUBLISHED = json.loads((Path(__file__).parent / "data" / "models.json").read_text())
# name -> hub name of its config, for all names that `config` knows; tiny twins are added below.
MODELS: dict[str, str] = {name: fields.pop("hub") for name, fields in _PUBLISHED.items()}
MIRRORS = ("unsloth", "nousresearch")  # hub owners who republish checkpoints with their configs
# name -> its hub name, and the hub names of other checkpoints with the same sizes (`also`).
_HUBS = {name: (hub, *_PUBLISHED[name].pop("also", ())) for name, hub in MODELS.items()}
# name -> the checkpoint's own task, if it is not the usual task of its architecture.
_TASKS = {name: fields.pop("task") for name, fields in _PUBLISHED.items() if "task" in fields}
# name -> the hub owners who publish it.
_OWNERS = {name: {hub.lower().split("/")[0] for hub in hubs} for name, hubs in _HUBS.items()}
# Names as people write them, hub names included -> name. A tiny twin has only its own name.
_WRITTEN = {hub: name for name, hubs in _HUBS.items() for hub in (*hubs, name)}
_WRITTEN |= {f"{name}-tiny": f"{name}-tiny" for name in MODELS}
_ALIASES = {squeezed(written): name for written, name in _WRITTEN.items()}
MODELS |= {f"{name}-tiny": f"a tiny twin of {hub}" for name, hub in list(MODELS.items())}

# Config fields for the width of feed-forward layers, by family.
WIDTHS = ("intermediate_size", "hidden_dim", "d_ff", "n_inner")
# Config fields for the width of one routed expert and of the shared expert. Granite 4 without
# experts keeps its only feed-forward width in `shared_intermediate_size`.
EXPERT_WIDTHS = (
    "moe_intermediate_size",
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # fields for their number
OF_DELTA_RULE = "linear_key_head_dim"  # a field of configs with Qwen3.5's kind of linear attention
OF_SHORT_CONVOLUTIONS = "conv_L_cache"  # a field of configs with LFM2's kind of convolutions
# What a config or the building of its model raises if the values do not go together.
MISFITS = (AssertionError, AttributeError, LookupError, TypeError, ZeroDivisionError)
OTHERWISE = "`memlab run` takes a script that trains any other model, also of images or speech"
TASKS = ("sequence-classification", "causal-lm", "masked-lm", "seq2seq-lm")
AUTO_CLASSES = {  # task -> class of transformers
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}


def config(model: Model) -> PretrainedConfig:
    """A fresh config of a model, which the caller may change.

    model: a name of the catalogue, a hub name, a config.json or its folder, a config of
        transformers, or a dictionary with the values of a config.json. The dictionary needs a
        `model_type`.

    If a config nests several models, such as text and vision, the result is the config of the text
    model (see `left_out`).

    Raises ValueError, in one line, for an unknown name and for a file or values that are no config.
    A hub name that is neither cached nor reachable raises ValueError too.
    """
    text = copy.deepcopy(_text_of(published(model)))
    check_sizes(vars(text))
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # describes the published weights, not the architecture
    return text


def published(model: Model) -> PretrainedConfig:
    """The config as it was given or published. It may be shared: do not change it."""
    name = catalogued(model)
    if isinstance(name, dict):
        return _from_values(name, "model")
    if not isinstance(name, str):
        if not hasattr(type(name), "to_json_string"):
            kind = name.__name__ if isinstance(name, type) else f"of type {type(name).__name__}"
            raise ValueError(
                f"model is {kind}: allowed are a name and a config, such as model.config"
            )
        return name
    if name in MODELS:
        return _of_catalogue(name)
    if Path(name).exists() or name.endswith(".json"):
        return _read_file(Path(name))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _read_hub(name)
    raise ValueError(
        f"unknown model {name!r}{_nearest(name)}: known are {_known(name)} (each also as "
        "<name>-tiny), or a config.json, a folder that save_pretrained wrote, or a hub name like "
        f"org/name; {OTHERWISE}"
    )


def _nearest(name: str) -> str:
    # A hint for an error message: the model without its 4-bit suffix, or the most similar name.
    plain = FOUR_BITS.sub("", name)
    if plain != name and (model := _ALIASES.get(squeezed(plain))):
        return f", which is {model!r} in 4 bits: name that, with a lora_rank and base nf4"
    near = nearest_model(name, _WRITTEN)
    return f", the nearest is {_WRITTEN[near]!r}" if near else ""


def _known(name: str) -> str:
    # For an error message: all names, unless the one that was meant is named already.
    return "the names in memlab.models.MODELS" if _nearest(name) else ", ".join(_PUBLISHED)


@functools.cache
def _of_catalogue(name: str) -> PretrainedConfig:
    if name not in _PUBLISHED:
        return twin(name.removesuffix("-tiny"))
    from transformers import CONFIG_MAPPING

    fields = copy.deepcopy(_PUBLISHED[name])
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def catalogued(model: Model) -> str | dict[str, Any] | PretrainedConfig:
    """The name in `MODELS` that a text means, in any case and for any tuned variant.

    A text may be a hub name. Its owner must then be the publisher or one of `MIRRORS`; for Phi only
    the publisher counts, because a mirror republishes it as a Llama. A text that means no model of
    the catalogue, or that is a path on this machine, is returned as it is. So is anything that is
    not a text.
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
    if given.is_encoder_decoder:  # `get_text_config` would return its decoder alone
        return given
    try:
        return given.get_text_config()
    except ValueError:  # it nests several text models
        return given


@remembered
def left_out(model: Model) -> list[str]:
    """The parts of a nested config that `config` leaves out, such as `vision`.

    The list is empty for most models.
    """
    given = published(model)
    text = _text_of(given)
    # A part is left out if it exists and is not the text model itself.
    parts = {name: getattr(given, name, None) for name in given.sub_configs}
    left = (n for n, it in parts.items() if not (text is given or it is None or it is text))
    return [name.removesuffix("_config") for name in left]


def settings(model: Model) -> Any:
    """The attributes of a model's config, for reading only.

    For a model of the catalogue this is a namespace from cached facts, which needs no transformers.
    It has each value under all names of it. For other models it is a config.
    """
    return _namespace(model) if isinstance(model, str) and model in MODELS else config(model)


@functools.cache
def _namespace(name: str) -> SimpleNamespace:
    values, other_names, computed = facts_of(name)
    mapped = {new: values.get(old) for new, old in other_names.items()}
    return SimpleNamespace(**values | mapped | computed)


@remembered
def facts_of(model: Model) -> list[dict[str, Any]]:
    """[values, other names, computed values] of a config, as plain JSON.

    The values are those of `to_json_string`. The other names are the config's `attribute_map`, such
    as `hidden_size` for GPT-2's `n_embd`. Some configs compute a value: ModernBERT's
    `sliding_window` is half its local attention.
    """
    full = config(model)
    window = getattr(full, "sliding_window", None)
    computed = {} if window is None else {"sliding_window": window}
    return [json.loads(full.to_json_string(use_diff=False)), dict(full.attribute_map), computed]


def identity(model: Model) -> tuple[str, str]:
    """(name in `MODELS`, or an empty text; all published values as JSON) of a model."""
    if isinstance(model, str) and model in MODELS:
        return model, json.dumps(_PUBLISHED[model.removesuffix("-tiny")])
    return "", published(model).to_json_string(use_diff=False)


def _read_file(path: Path) -> PretrainedConfig:
    """The config in a config.json. Only its values are used; code that it names is not run."""
    folder, path = path, path / "config.json" if path.is_dir() else path
    if folder.is_dir() and (folder / "adapter_config.json").exists() and not path.exists():
        raise ValueError(f"{folder}: holds only an adapter: name the model that it was trained on")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        advice = "name a config.json, or a folder that save_pretrained wrote"
        raise ValueError(f"{path}: there is no such file: {advice}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({one_line(error)})") from None
    return _from_values(values, path)


def _from_values(values: Any, place: str | Path) -> PretrainedConfig:
    """The config with the values of a config.json; error messages begin with `place`."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    family = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise ValueError(
            f"{place}: model_type is {family!r}: allowed are those of the installed "
            f"transformers {transformers.__version__}; a newer one may know it"
        )
    try:
        return CONFIG_MAPPING[family].from_dict(with_floats(values))
    except (StrictDataclassError, ValueError, *MISFITS) as error:
        raise ValueError(f"{place}: not a valid {family} config ({one_line(error)})") from None


def _read_hub(name: str) -> PretrainedConfig:
    from transformers import AutoConfig

    problem = "there is no network"
    # The local cache first: it answers without a network, and without the client's retries.
    for cached_only in (True, False):
        if cached_only or hub_reachable():
            try:
                return AutoConfig.from_pretrained(name, local_files_only=cached_only)
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                problem = problem if cached_only else one_line(error)
    raise ValueError(
        f"there is no folder {name!r}, and its config cannot be read from the hub ({problem})"
        f"{_nearest(name)}: known without the hub are {_known(name)}, or a config.json; {OTHERWISE}"
    )


def twin(model: Model) -> PretrainedConfig:
    """The config of a model's tiny twin: 2 layers, hidden size 96 to 256, vocabulary up to 4,096.

    If the model has several kinds of layers, the twin has the first layer and the next one of
    another kind. These stay as they are: query heads per key-value head, the ratio of the
    feed-forward width to the hidden size, the number of experts (up to 32), dropout, positions and
    tied embeddings.

    Raises ValueError for a family that is not in the catalogue.
    """
    tiny = config(model)
    families = sorted({config(name).model_type for name in _PUBLISHED})
    one_of("the model type of a tiny twin", tiny.model_type, families)
    # Two key-value heads with the model's own number of query heads each, or else four heads.
    heads, wide = tiny.num_attention_heads, tiny.hidden_size
    key_value_heads = getattr(tiny, "num_key_value_heads", None) or heads
    grouped = key_value_heads < heads
    new_heads = 2 * (heads // key_value_heads) if grouped else 4
    # Heads of 32 numbers, or of 16 if there are many. Mixtures are narrower: up to 32 experts.
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
    # `resized` ignores fields that the architecture does not have, so all families share this list.
    for name in (*WIDTHS, *EXPERT_WIDTHS, "hidden_size_per_layer_input"):
        values[name] = round((getattr(tiny, name, None) or 0) * new_wide / wide / 16) * 16
    # T5's size of a head, which need not be the hidden size over the heads.
    values["d_kv"] = (getattr(tiny, "d_kv", None) or 0) * heads * new_wide // (wide * new_heads)
    if getattr(tiny, "linear_num_key_heads", None):  # linear attention of Qwen3.5
        per_key = tiny.linear_num_value_heads // tiny.linear_num_key_heads
        values |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * per_key}
        values |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
    if getattr(tiny, "kv_lora_rank", None):  # DeepSeek's latent attention, in GLM-4.7-Flash
        rope = values["head_dim"]
        for name in ("qk_nope_head_dim", "v_head_dim", "qk_head_dim"):
            values[name] = rope * getattr(tiny, name) // tiny.qk_rope_head_dim
        for name in ("q_lora_rank", "kv_lora_rank"):
            values[name] = getattr(tiny, name) * new_wide // wide
    for name in EXPERTS:
        values[name] = min(getattr(tiny, name, None) or 0, 32)
    lists = by_layer(tiny)
    # Each entry describes one layer. Take the first, and the first that differs from it.
    layers = list(zip(*lists.values(), strict=True))
    other = next((i for i, layer in enumerate(layers) if layer != layers[0]), 0)
    values |= {name: [value[0], value[other]] for name, value in lists.items()}
    if not getattr(tiny, "is_heterogeneous", False):
        return resized(with_layers(tiny, 2), **values)
    # Gemma 4: layers with full attention have wider heads than layers with a sliding window.
    widths = [tiny.per_layer_config[layer].head_dim for layer in (0, other)]
    tiny.per_layer_config = None
    small = resized(with_layers(tiny, 2), **values)
    small.per_layer_config = {1: {"head_dim": small.head_dim * widths[1] // widths[0]}}
    return small


def resized(model: Model, **values: Any) -> PretrainedConfig:
    """A copy of a config with these values; fields that the architecture lacks are ignored.

    Special tokens beyond a smaller vocabulary become its last entry. Lists with one factor per
    rotary frequency are cut or repeated to the new number of frequencies.
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
    # longrope: one factor per pair of rotated numbers in a head.
    for name in {"short_factor", "long_factor"} & rope.keys():
        head = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
        pairs = int(head * rope.get("partial_rotary_factor", 1)) // 2
        rope[name] = (rope[name] * pairs)[:pairs]
    return small


def with_layers(model: Model, layers: int) -> PretrainedConfig:
    """A copy of a config with this many layers, in the encoder and in the decoder.

    With another number than its own, no layer shares the keys and values of an earlier layer
    (Gemma 4's `num_kv_shared_layers`).
    """
    full = config(model)
    values = {name: (value * layers)[:layers] for name, value in by_layer(full).items()}
    apart = {} if layers == full.num_hidden_layers else {"num_kv_shared_layers": 0}
    return resized(full, num_hidden_layers=layers, num_decoder_layers=layers, **values, **apart)


def by_layer(full: PretrainedConfig) -> dict[str, list[Any]]:
    """Name -> list of each field of a config that has one entry per layer."""
    # A list may have the length by chance. In the default config of the class, a list with one
    # entry per layer has the default number of layers as its length.
    usual = type(full)()

    def fits(config: PretrainedConfig, value: object) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers

    return {
        name: value
        for name, value in vars(full).items()
        if fits(full, value) and (not vars(usual).get(name) or fits(usual, vars(usual)[name]))
    }


def tasks(model: Model) -> tuple[str, ...]:
    """The tasks of `TASKS` that an architecture has; the checkpoint's own task comes first."""
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
        # T5's classifier reads the state at the end-of-sequence token, which random data lacks.
        return ("seq2seq-lm",)
    # BERT and its like are also in the causal mapping, as decoders: another architecture.
    if "masked-lm" in has:
        return tuple(t for t in ("sequence-classification", "masked-lm") if t in has)
    if values.is_encoder_decoder or not has:  # Whisper's decoder alone is another architecture too
        raise ValueError(
            f"model type {family!r} has none of the tasks {', '.join(TASKS)}: "
            "`memlab run` takes a script that trains it"
        )
    return tuple(has)


def default_task(model: Model) -> str:
    """The usual task of an architecture: classification for encoders, else language modelling."""
    return tasks(model)[0]


def max_length(model: Model) -> int | None:
    """The longest sequence in tokens; None if positions are only relative (T5, DeBERTa-v3).

    Rotary positions can be stretched, by the model's `rope_type`:

    - linear, dynamic: `factor` times `max_position_embeddings`.
    - yarn: `factor` times `original_max_position_embeddings`, because many a config.json leaves
      that number as the maximum; but at least `max_position_embeddings`.
    - llama3, longrope: `max_position_embeddings` already includes the factor.

    The rules are those of transformers' modeling_rope_utils.py, and of vLLM's longest sequence.
    """
    values = settings(model)
    if not getattr(values, "position_biased_input", True):
        return None
    longest = getattr(values, "max_position_embeddings", None)
    longest = None if longest == -1 else longest  # XLNet: no limit
    rope = getattr(values, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("linear", "dynamic"):
        longest = round(longest * rope["factor"])
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, round(original * rope["factor"]))
    if longest is not None and values.model_type in ("roberta", "xlm-roberta", "camembert"):
        longest -= values.pad_token_id + 1  # their positions start at pad_token_id + 1
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

    model: anything that `config` takes.
    task: one of `TASKS`; None is the usual task of the architecture.
    dtype: the dtype of parameters and buffers; None is fp32.
    attention: an attention implementation of transformers.
    seed: the global torch seed, which this sets.

    The weights are created on the current default device. Inside a FakeTensorMode nothing is
    allocated.

    Raises ValueError for a task or an attention that the architecture does not have, and for a
    config whose values do not go together.
    """
    import torch
    import transformers

    values = config(model)
    allowed = tasks(model)
    task = allowed[0] if task is None else task
    if task not in allowed:
        raise ValueError(
            f"task {task!r} is not a task of model type {values.model_type!r}: "
            f"allowed are {', '.join(allowed)}"
        )
    values.use_cache = False
    if task == "sequence-classification":
        # Without it, DeBERTa's forward pass derives the kind of loss from the labels' values.
        values.problem_type = "single_label_classification"
        if values.pad_token_id is None:  # a decoder needs it to find each sequence's last token
            ends = values.eos_token_id or 0
            values.pad_token_id = ends[0] if isinstance(ends, list) else ends
    if task == "seq2seq-lm" and getattr(values, "decoder_start_token_id", None) is None:
        values.decoder_start_token_id = values.pad_token_id or 0  # as in T5's checkpoints
    torch.manual_seed(seed)
    try:
        built = getattr(transformers, AUTO_CLASSES[task]).from_config(
            values, dtype=dtype or torch.float32, attn_implementation=attention
        )
    except MISFITS as error:  # such as a padding token beyond the vocabulary, or zero heads
        raise ValueError(
            f"not a valid {values.model_type} config ({type(error).__name__}: {one_line(error)})"
        ) from None
    except (ValueError, ImportError) as error:  # from here on only the attention can be wrong
        raise ValueError(
            f"attention {attention!r} is not available for model type {values.model_type!r}: "
            f"allowed is eager ({one_line(error)})"
        ) from None
    if task == "causal-lm" and getattr(built, "loss_type", None) is None:
        built.loss_type = "ForCausalLM"  # GPT-2: transformers would fall back to it with a warning
    if task == "seq2seq-lm" and _has_own_head(values):  # untie the head from the embedding
        built.lm_head.weight = torch.nn.Parameter(built.lm_head.weight.detach().clone())
        del built.all_tied_weights_keys["lm_head.weight"]
    return built.train()


def skeleton(model: Model, task: str | None = None, attention: str = "eager") -> PreTrainedModel:
    """The model of `build` on the meta device: weights with shapes and no data."""
    import torch

    with torch.device("meta"):
        return build(model, task, attention=attention)


def _has_own_head(values: PretrainedConfig) -> bool:
    """Whether a checkpoint of T5's family has a head of its own, as from T5 1.1 on.

    transformers sets `tie_word_embeddings` for all of them, because encoder and decoder share their
    embeddings. It keeps what a 1.1 config.json says as `scale_decoder_outputs`. mT5 and umT5 are
    all 1.1.
    """
    scaled = getattr(values, "scale_decoder_outputs", True)
    return values.model_type in ("mt5", "umt5") or not scaled


def active_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """(all parameters, parameters that one token uses) of a mixture of experts."""
    named = list(skeleton(config).named_parameters())
    total = sum(p.numel() for _, p in named)
    experts = sum(p.numel() for name, p in named if ".experts." in name)
    there_are = next(n for name in EXPERTS if (n := getattr(config, name, None)))
    return total, total - experts + experts * config.num_experts_per_tok // there_are
