"""Named architectures: published sizes, tiny twins, tasks, bad input."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers import one_line, refused

from memlab import Recipe, models, simulate
from memlab.names import squeezed
from memlab.predict.recipe_log import assumed
from memlab.spec.serving import Serving

# Parameters of the published checkpoints with this package's usual head, two labels for
# classifiers. Sources: the element counts that the Hugging Face hub shows for the safetensors files
# of Llama 3.x, Qwen2.5, Mistral and Mixtral (`HfApi().model_info(name).safetensors.total`);
# KerasHub's presets for T5-3B and GPT-2 medium and large; AuroraGPT's log and the LoRAM paper for
# Llama-2-70B; for BERT, DistilBERT, RoBERTa and DeBERTa-v3 `model.num_parameters()` after
# `from_pretrained`, as training logs print it. Papers round them (110M, 340M, 1.5B, 8B, 46.7B).
# Of the later ones: the hub's counts as others quote them, for Qwen3 4B, 8B and 32B, Qwen2.5-3B,
# Llama-3.3-70B, Gemma 2 and Gemma 3 1B, Mistral-7B-v0.3 and Nemo, Phi-4, Phi-4-mini, gpt-oss-20b
# (two MXFP4 values in each stored byte counted as two), SmolLM3 and TinyLlama; for Qwen3 0.6B and
# 1.7B less the copy of the tied head that their files hold. KerasHub's presets for Qwen3 14B and
# 30B-A3B, flan-T5-base and Magistral-Small-2506, which has Mistral-Small-24B's architecture;
# `n_params` of llama.cpp for Qwen2.5-14B and the text model of Qwen3.5-9B; for Gemma 3 4B to 27B
# KerasHub's text models and 64 rows of the embedding, which only the hub's have. The classifiers of
# RoBERTa-large, XLM-R and ModernBERT have the encoders of KerasHub's presets and of the hub's
# counts (561,192,082, 278,885,778 and 149,655,232 with the head of a masked language model). The
# hub's counts as others quote them for Qwen2.5-32B and 72B, Gemma 3 270M and gpt-oss-120b, too.
#
# Of those since November 2026, first the source of the sizes, then of the count. "hub" is its count
# as others quote it.
# deberta-v3-large: rtd_large.json of microsoft/DeBERTa; KerasHub's preset, and the classifier.
# modernbert-large: generate_eval_config.py of AnswerDotAI/ModernBERT; hub (395,881,664 with the
#   head of a masked language model).
# bge-m3: its config as others repeat it; hub (567,754,752 with a pooler in place of the head).
# qwen3-embedding-0.6b: its config as others repeat it; KerasHub's preset, and the classifier.
# qwen3.5-0.8b, 4b: torchtitan's models/qwen3_5; `n_params` of llama.cpp.
# qwen3.5-35b-a3b: MaxText's configs/models, torchtitan; `n_params` of llama.cpp.
# gemma-4-e2b, e4b: MaxText's configs/models and hf_model_configs.py; `n_params` of llama.cpp, hub
#   (7,996,156,490 with all parts). What only the files have is taken off: products and norms of
#   keys and values in layers that take those of an earlier one (18,880,512 and 55,055,616), a
#   scalar per layer, and 256 rotary frequencies of llama.cpp.
# ministral-3-8b: defaults of transformers' class, docs of NVIDIA's Megatron-Bridge; hub
#   (8,918,026,716 with the vision model and 476 scales of FP8 weights).
# olmo-3-7b: MaxText's configs/models, OLMo-core's olmo3_7B; hub.
# granite-4.0-micro: IBM's account of Granite 4.1, whose 3B has the same architecture; hub.
# lfm2-1.2b: log in ggml-org/llama.cpp#18641; hub.
# glm-4.7-flash: defaults of transformers' class, log in ikawrakow/ik_llama.cpp#1167; `n_params` of
#   llama.cpp, less 2,944 biases of routers.
PUBLISHED = {
    "bert-base": 109_483_778,
    "bert-large": 335_143_938,
    "distilbert": 66_955_010,
    "roberta-base": 124_647_170,
    "deberta-v3-base": 184_423_682,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "t5-3b": 2_851_598_336,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "roberta-large": 355_361_794,
    "xlm-roberta-base": 278_045_186,
    "xlm-roberta-large": 559_892_482,
    "modernbert-base": 149_606_402,
    "flan-t5-base": 247_577_856,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-9b": 8_953_803_264,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "gpt-oss-20b": 20_914_757_184,
    "smollm3-3b": 3_075_098_624,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "gemma-3-270m": 268_098_176,
    "gpt-oss-120b": 116_829_156_672,
    "deberta-v3-large": 434_012_160 + 1_051_650,
    "modernbert-large": 395_833_346,
    "bge-m3": 567_754_752 + 2_050,
    "qwen3-embedding-0.6b": 595_776_512 + 2_048,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "gemma-4-e2b": 4_647_450_147 - 18_880_512 - 35 - 256,
    "gemma-4-e4b": 7_463_013_376,
    "ministral-3-8b": 8_489_553_920,
    "olmo-3-7b": 7_298_011_136,
    "granite-4.0-micro": 3_402_836_480,
    "lfm2-1.2b": 1_170_340_608,
    "glm-4.7-flash": 29_943_393_920 - 2_944,
}
# The same with the vision models, and with the audio model of Gemma 4. Of Gemma 3 and 4 and of
# Ministral 3 the hub's counts, as others quote them, less what only the files have (above). Of
# Qwen3.5 KerasHub's presets: the hub's counts, such as 9,653,104,368, have a layer for drafts, too.
WHOLE = {
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "qwen3.5-9b": 9_409_813_744,
    "qwen3.5-0.8b": 852_985_920,
    "qwen3.5-4b": 4_539_265_536,
    "qwen3.5-35b-a3b": 35_107_181_936,
    "gemma-4-e2b": 5_123_178_051 - 18_880_512 - 35,
    "gemma-4-e4b": 7_996_156_490 - 55_055_616 - 42,
    "ministral-3-8b": 8_918_026_716 - 476,
}
FULL = [name for name in models.MODELS if not name.endswith("-tiny")]
# One of each architecture.
KINDS = {models.config(name).model_type: name for name in FULL}.values()


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(models, "hub_reachable", lambda: False)


def batch(config, task, length=16):
    ids = torch.randint(0, config.vocab_size - 1, (2, length))
    labels = torch.zeros(2, dtype=torch.long) if task == "sequence-classification" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.parametrize("name", FULL)
def test_parameters_are_those_of_the_published_checkpoint(name):
    with torch.device("meta"):
        assert models.build(name).num_parameters() == PUBLISHED[name]


# Of DeBERTa, T5 and Qwen3's mixture: their configs have no default of these.
READ_BY_MODELS = {"share_att_key", "norm_rel_ebd", "position_buckets"}
READ_BY_MODELS |= {"decoder_start_token_id", "head_dim"}


def test_an_entry_has_values_of_its_config_alone():
    """A config takes any value; a misspelt one would be kept and decide nothing."""
    file = Path(models.__file__).parent / "data" / "models.json"
    entries = json.loads(file.read_text())
    for name, entry in entries.items():
        kind = transformers.CONFIG_MAPPING[entry["model_type"]]
        known = set(kind().to_dict()) | set(kind.attribute_map)
        assert set(entry) - known <= {"hub", "also", "task", *READ_BY_MODELS}, name


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_left_out_are_the_published_models_of_images_and_sound(name):
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(models.published(name))
    assert whole.num_parameters() == WHOLE[name]
    others = ["vision", "audio"] if name.startswith("gemma-4") else ["vision"]
    assert models.left_out(name) == others


@pytest.mark.parametrize("name", FULL)
def test_twin_is_small_and_of_the_same_kind(name):
    full, tiny = models.config(name), models.config(f"{name}-tiny")
    assert tiny.model_type == full.model_type
    assert tiny.num_hidden_layers == 2
    assert 96 <= tiny.hidden_size <= 256
    assert 1_000 <= tiny.vocab_size <= 5_000
    heads = full.num_attention_heads, tiny.num_attention_heads
    groups = getattr(full, "num_key_value_heads", None), getattr(tiny, "num_key_value_heads", None)
    if groups[0] is not None:
        assert heads[0] // groups[0] == heads[1] // groups[1]
    for kind in models.EXPERTS:
        experts = getattr(full, kind, None)
        assert getattr(tiny, kind, None) == (experts and min(experts, 32))
    for kinds in ("layer_types", "no_rope_layers"):
        assert set(getattr(tiny, kinds, None) or ()) == set(getattr(full, kinds, None) or ())
    longest = models.max_length(f"{name}-tiny")
    assert longest == models.max_length(name)
    assert longest is None or longest >= 512
    assert models.build(tiny).num_parameters() < 5_000_000


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-1b", "gpt2"])
def test_twin_of_one_layer_has_two_alike(name):
    tiny = models.twin(models.with_layers(name, 1))
    assert tiny.num_hidden_layers == 2
    assert len(set(getattr(tiny, "layer_types", None) or [1])) == 1
    assert models.build(tiny).num_parameters() < 5_000_000


@pytest.mark.parametrize("name", KINDS)
def test_twin_trains_on_every_task(name):
    for task in models.tasks(name):
        model = models.build(f"{name}-tiny", task)
        assert model.training
        loss = model(**batch(model.config, task)).loss
        loss.backward()
        assert torch.isfinite(loss)


def test_the_longest_sequence_runs_and_one_more_token_does_not():
    for name in ("bert-base-tiny", "roberta-base-tiny", "distilbert-tiny"):
        model, longest = models.build(name), models.max_length(name)
        assert longest == 512
        model(input_ids=torch.full((1, longest), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, longest + 1), 7))
    relative = models.build("deberta-v3-base-tiny")
    assert models.max_length("deberta-v3-base") is None
    relative(input_ids=torch.full((1, 600), 7))


def test_weights_follow_the_dtype():
    half = models.build("llama-3-8b-tiny", dtype=torch.bfloat16, attention="sdpa")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.config._attn_implementation == "sdpa"
    assert half.config.use_cache is False


def test_config_is_a_fresh_copy():
    models.config("qwen2.5-7b").rope_parameters["rope_theta"] = 1.0
    assert models.config("qwen2.5-7b").rope_parameters["rope_theta"] == 1e6
    given = transformers.BertConfig(hidden_size=64, num_attention_heads=4)
    assert models.config(given) is not given
    assert models.config(given).to_dict() == given.to_dict()


def test_config_from_a_file_or_its_folder(tmp_path):
    models.config("llama-3.2-1b").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path / "config.json")):
        read = models.config(path)
        assert read.num_key_value_heads == 8
        assert read.rope_parameters["rope_type"] == "llama3"
        assert models.twin(path).num_hidden_layers == 2


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "JSON"),
        ("[1, 2]", "model_type"),
        ("{}", "model_type"),
        ('{"model_type": "resnet-of-mine"}', "resnet-of-mine"),
        (json.dumps({"model_type": "bert", "hidden_size": "many"}), "hidden_size"),
    ],
)
def test_broken_config_file(tmp_path, text, wrong):
    path = tmp_path / "config.json"
    path.write_text(text)
    with refused(str(path), wrong):
        models.config(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "not a valid llama config"),
        ({"hidden_size": -64}, "hidden_size is -64: allowed are whole numbers from 1"),
        ({"intermediate_size": -5}, "intermediate_size is -5: allowed are whole numbers from 0"),
        ({"num_hidden_layers": 10**6}, "is 1000000: allowed are whole numbers from 1 to 1,000"),
    ],
)
def test_a_config_of_no_model_is_refused_in_one_line(changes, words):
    values = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    values |= {"num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128}
    with refused(words):
        simulate(Recipe(values | changes, seq_len=16))


def test_unknown_names():
    with refused("'bert-huge', the nearest is 'bert-large'"):
        models.config("bert-huge")
    with refused("no such file"):
        models.config("nowhere/config.json")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Llama-3-8B", "llama-3-8b"),
        ("GPT2-tiny", "gpt2-tiny"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("unsloth/Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("qwen3:8b", "qwen3-8b"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("phi4", "phi-4"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "qwen3-8b"),
        ("hf.co/meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
        ("llama-3.1-70b", "llama-3.3-70b"),
        ("answerdotai/ModernBERT-large", "modernbert-large"),
        ("modern-bert-large", "modernbert-large"),
        ("microsoft/deberta-v3-large", "deberta-v3-large"),
        ("BAAI/bge-reranker-v2-m3", "bge-m3"),
        ("qwen3-embedding:0.6b", "qwen3-embedding-0.6b"),
        ("qwen3.5-4b-base", "qwen3.5-4b"),
        ("Qwen/Qwen3.6-35B-A3B", "qwen3.5-35b-a3b"),
        ("google/gemma-4-E2B-it", "gemma-4-e2b"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "ministral-3-8b"),
        ("mistralai/Ministral-3-8B-Base-2512", "ministral-3-8b"),
        ("olmo-3-7b-instruct", "olmo-3-7b"),
        ("allenai/Olmo-3-7B-Think-DPO", "olmo-3-7b"),
        ("lfm2-1.2b-rl", "lfm2-1.2b"),
        ("LiquidAI/LFM2.5-1.2B-Instruct", "lfm2-1.2b"),
        ("zai-org/GLM-4.7-Flash", "glm-4.7-flash"),
    ],
)
def test_hub_names_of_known_models_need_no_network(given, name):
    assert models.config(given).to_dict() == models.config(name).to_dict()
    assert Recipe(given, seq_len=16) == Recipe(name, seq_len=16)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("somebody/Llama-3.1-8B", "llama-3.1-8b"),  # whose config may be another
        ("unsloth/phi-4", "phi-4"),  # published as a Llama there
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-24b"),
        ("qwen3-30b", "qwen3-30b-a3b"),
        ("roberta", "roberta-base"),
        ("lama-3-8b-tiny", "llama-3-8b-tiny"),
        ("qwen3.5-35b", "qwen3.5-35b-a3b"),
        ("google/gemma-4-E4B-it-qat-q4_0", "gemma-4-e4b"),
    ],
)
def test_of_other_names_the_nearest_is_said(given, nearest):
    with refused(f", the nearest is {nearest!r}: known"):
        models.config(given)


@pytest.mark.parametrize(
    "given",
    [
        *("whisper-large-v3", "gemma-3-400m", "gpt-j-6b", "gemma-3n-e4b", "llama-2-13b", "t5-11b"),
        *("deberta-large", "deberta-v3-xlarge", "gemma-2b", "ministral-8b", "qwen3.5-27b"),
        *("qwen3-vl-8b", "qwen3-embedding-4b", "glm-4.7", "granite-4.0-h-micro", "phi-4-reasoning"),
    ],
)
def test_of_another_family_generation_kind_or_size_no_model_is_near(given):
    with pytest.raises(ValueError, match=f"unknown model {given!r}: known are"):
        models.config(given)


def test_a_checkpoint_in_4_bits_is_a_base_of_the_recipe():
    with refused("which is 'llama-3-8b' in 4 bits: .* base nf4"):
        models.config("unsloth/llama-3-8b-unsloth-bnb-4bit")


def test_no_two_models_have_a_name_in_common():
    written = [{squeezed(n) for n in (*hubs, name)} for name, hubs in models._HUBS.items()]
    assert sum(map(len, written)) == len(set().union(*written))


def test_infinity_is_read_as_transformers_writes_it(tmp_path):
    transformers.Mamba2Config(num_hidden_layers=2).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    for given in (tmp_path, json.loads(text)):
        assert "__float__" in text and models.config(given).time_step_limit[1] == float("inf")


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transformers.BertConfig(hidden_size=64, num_attention_heads=4).save_pretrained("Bert-Base")
    assert models.config("Bert-Base").hidden_size == 64


@pytest.mark.parametrize(
    ("family", "values", "own"),
    [
        ("t5", {}, False),
        ("t5", {"tie_word_embeddings": False}, True),  # T5 1.1, flan-T5
        ("mt5", {"tie_word_embeddings": False}, True),
    ],
)
def test_the_head_of_t5_and_its_successors(family, values, own, tmp_path):
    """From 1.1 on the head is not the embedding, though the config's class says so of all."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    given = {"model_type": family, "vocab_size": 100, **sizes}
    models.config(given | values).save_pretrained(tmp_path)  # transformers' own form of it
    for config in (given | values, tmp_path):
        model = models.build(config)
        assert (model.lm_head.weight is not model.shared.weight) == own
        assert model.get_encoder().embed_tokens.weight is model.shared.weight
        model(**batch(model.config, "seq2seq-lm")).loss.backward()


NESTED = {
    "model_type": "gemma3",
    "text_config": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}


def test_of_a_nested_config_the_text_model_is_taken(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NESTED))
    whole = transformers.Gemma3Config.from_dict(NESTED)
    text = transformers.Gemma3TextConfig(**NESTED["text_config"])
    recipe = Recipe(text, seq_len=16, lora_rank=2)
    for given in (NESTED, tmp_path, whole):
        assert models.config(given).vocab_size == 128
        assert assumed(recipe.but(model=given)) == ("only the text model, without vision",)
    nested, plain = simulate(recipe.but(model=whole)), simulate(recipe)
    assert nested.peak_allocated == plain.peak_allocated
    assert "only the text model, without vision" in str(nested)
    assert plain.assumptions == ()


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (transformers.WhisperConfig, "whisper"),
        (transformers.SiglipVisionConfig, "siglip_vision_model"),
        (transformers.Qwen3VLConfig, "qwen3_vl_text"),
    ],
)
def test_a_model_of_images_or_speech_is_no_language_model(config, family):
    with refused(f"{family!r} has none of the tasks", "`memlab run` takes a script"):
        Recipe(config(), seq_len=16)


@pytest.mark.parametrize("name", ["whisper-large-v3", "Qwen/Qwen3-VL-8B-Instruct", "siglip"])
def test_names_of_such_models_are_sent_to_run(name):
    with pytest.raises(ValueError, match="`memlab run` takes a script that trains any") as error:
        Recipe(name, seq_len=16)
    assert "nearest" not in one_line(error)


def test_a_model_without_an_end_of_positions():
    config = transformers.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=99)
    assert models.max_length(config) is None
    assert simulate(Recipe(config, seq_len=2048)).peak_allocated > 0


MXFP4 = {"quant_method": "mxfp4"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def quantized(said):
    config = models.config("llama-3-8b-tiny")
    config.quantization_config = said
    return config


@pytest.mark.parametrize(
    ("said", "changes", "expected"),
    [
        (MXFP4, {}, "is published quantized, by mxfp4: allowed are unquantized"),
        (MXFP4, {"lora_rank": 2, "base": "nf4"}, "by mxfp4"),
        ({"quant_method": "awq", "bits": 4}, {}, "by awq"),
        (NF4, {}, "by bitsandbytes as nf4: allowed is that base, not none"),
        (NF4, {"lora_rank": 2, "base": "fp4"}, "not fp4"),
        (
            NF4 | {"bnb_4bit_use_double_quant": True},
            {"lora_rank": 2, "base": "nf4"},
            "as nf4 with double quantization",
        ),
    ],
)
def test_published_quantized_weights_are_never_taken_for_others(said, changes, expected, tmp_path):
    config = quantized(said)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for given in (config, config.to_dict(), tmp_path):
        with refused(expected):
            Recipe(given, seq_len=16, **changes)


def test_a_published_base_of_bitsandbytes_is_that_base():
    recipe = Recipe(quantized(NF4), seq_len=16, lora_rank=2, base="nf4")
    plain = simulate(recipe.but(model="llama-3-8b-tiny"))
    assert simulate(recipe).peak_allocated == plain.peak_allocated
    eight = quantized({"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert Serving(eight, weights="int8").base == "int8"
    with refused("by mxfp4"):
        Serving(quantized(MXFP4))
    with refused("as nf4: allowed is that base, not nf4 with double quantization"):
        Serving(quantized(NF4), weights="nf4")
    served = Serving(quantized(NF4), weights="nf4", double_quant=False)
    double = Serving(quantized(NF4 | {"bnb_4bit_use_double_quant": True}), weights="nf4")
    # A scale in 32 bits per 64 weights, or in 8 with one more in 32 per 256 of these.
    assert simulate(served).prefill["weights"] > simulate(double).prefill["weights"]


@pytest.mark.parametrize("given", [None, 3, torch.nn.Linear(1, 1), transformers.BertConfig])
def test_what_is_neither_name_nor_config_is_refused(given):
    with refused("^model is ", "model.config"):
        Recipe(given, batch_size=2)


def test_hub_name_without_a_network():
    with refused("'nobody/no-such-model-at-all'", "no network"):
        models.config("nobody/no-such-model-at-all")


def test_a_classifier_pads_with_the_first_of_several_ends():
    assert models.config("llama-3.3-70b").eos_token_id == [128_001, 128_008, 128_009]
    model = models.build("llama-3.3-70b-tiny", "sequence-classification")
    assert model.config.pad_token_id == model.config.vocab_size - 1


def test_task_or_attention_that_the_model_lacks():
    with refused("allowed are sequence-classification, masked-lm"):
        models.build("bert-base-tiny", "causal-lm")
    with refused("'translation'"):
        models.build("gpt2-tiny", "translation")
    with refused("allowed is eager"):
        models.build("deberta-v3-base-tiny", attention="sdpa")
    with refused("the model type of a tiny twin is 'opt'"):
        models.twin(transformers.OPTConfig())


def test_embeddings_narrower_than_layers_are_counted():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    sizes |= {"embedding_size": 32, "intermediate_size": 128}
    recipe = Recipe(transformers.ElectraConfig(**sizes), seq_len=16)
    assert simulate(recipe).parameters == models.build(recipe.model).num_parameters()
