"""The page on troubles: its figures are what shapes give; its names and defaults exist."""

import dataclasses
import html
import inspect
import math
import re
import sys
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from torch._subclasses import FakeTensorMode
from transformers.quantizers import quantizer_bnb_4bit

from memlab import find_gpu, models
from memlab.libraries import import_bitsandbytes

ROOT = Path(__file__).parent.parent
CHAPTERS = ROOT / "chapters"
sys.path.insert(0, str(ROOT / "tools"))
from figures import FIGURE  # noqa: E402

PAGE = (CHAPTERS / "troubleshooting.md").read_text(encoding="utf-8")
FIGURES = [(match[1], match[4]) for match in FIGURE.finditer(PAGE)]


@pytest.fixture(scope="module")
def known():
    """The names that the page's figures are made of."""
    llama = models.config("llama-3-8b")
    with FakeTensorMode():
        weights = models.build("llama-3-8b").num_parameters()
        small = models.build("llama-3.2-3b").num_parameters()
    d, inner = llama.hidden_size, llama.intermediate_size
    keys = d * llama.num_key_value_heads // llama.num_attention_heads
    shapes = [(d, d), (d, keys), (d, keys), (d, d), (d, inner), (d, inner), (inner, d)]
    return {
        "llama": llama,
        "weights": weights,
        "small": small,
        "table": llama.vocab_size * d,
        "adapters": 16 * llama.num_hidden_layers * sum(map(sum, shapes)),
        "card": find_gpu("RTX-4090"),
        "gib": lambda size: f"{size / 2**30:.1f}",
        "MiB": 2**20,
        "math": math,
    }


@pytest.mark.parametrize("expression, said", sorted(set(FIGURES)))
def test_a_figure_is_what_the_shapes_give(expression, said, known):
    assert eval(html.unescape(expression), known) == said


def fields(config):
    return {field.name: field.default for field in dataclasses.fields(config)}


def test_old_names_are_refused_and_new_ones_taken():
    table = PAGE.partition("## Changed names")[2]
    names = fields(transformers.TrainingArguments)
    rows = re.findall(r"^\| `(\w+)=[^`]*` \| `(\w+)=", table, re.MULTILINE)
    assert len(rows) == 6
    for old, new in rows:
        if new == "dtype":  # an argument of from_pretrained
            continue
        assert new in names and (old in names) == (old == "gradient_checkpointing"), old


def test_defaults_of_the_trainer():
    names = fields(transformers.TrainingArguments)
    assert names["per_device_eval_batch_size"] == 8 and names["save_steps"] == 500
    assert names["logging_nan_inf_filter"] and names["save_total_limit"] is None
    assert names["max_grad_norm"] == 1.0
    for name in ("eval_accumulation_steps", "prediction_loss_only", "batch_eval_metrics"):
        assert name in names and name in PAGE
    for name in ("eval_on_start", "save_only_model", "torch_compile", "use_liger_kernel"):
        assert name in names and name in PAGE


def test_defaults_of_trl():
    trl = pytest.importorskip("trl")
    grpo, dpo, sft = map(fields, (trl.GRPOConfig, trl.DPOConfig, trl.SFTConfig))
    assert (grpo["vllm_gpu_memory_utilization"], grpo["beta"]) == (0.3, 0.0)
    assert (grpo["vllm_mode"], grpo["vllm_enable_sleep_mode"]) == ("colocate", False)
    assert sft["max_length"] == dpo["max_length"] == 1024 and sft["loss_type"] == "nll"
    assert dpo["precompute_ref_log_probs"] is False and "vllm_max_model_length" in grpo
    assert sft["bf16"] is None  # which becomes true unless fp16 is
    assert sft["gradient_checkpointing"] is True and sft["activation_checkpointing"] is None
    rates = [config["learning_rate"] for config in (dpo, grpo, sft)]
    assert rates == [1e-6, 1e-6, 2e-5] and "have 1e-6 where `SFTConfig` has 2e-5" in PAGE
    assert (grpo["num_generations"], grpo["max_completion_length"]) == (8, 512)
    script = (Path(trl.__file__).parent / "scripts" / "dpo.py").read_text(encoding="utf-8")
    assert re.findall(r"--learning_rate ([\d.e-]+)", script) == ["5.0e-7", "5.0e-6"]


def test_what_the_snippets_say_is_taken():
    history = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert history["max_entries"].default == sys.maxsize and "enabled" in history
    assert fields(transformers.TrainingArguments)["auto_find_batch_size"] is False
    finder = (Path(accelerate.__file__).parent / "utils" / "memory.py").read_text("utf-8")
    assert "batch_size = int(batch_size * 0.9)" in finder and "nine tenths" in PAGE
    plugin = accelerate.utils.TorchDynamoPlugin
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")
        assert plugin().dynamic is True


def test_what_bitsandbytes_says_of_a_forgotten_dtype_is_said_here():
    said = re.search(r"- `(bnb_4bit_compute_dtype=[^`]*)`", PAGE)[1]
    assert said in inspect.getsource(import_bitsandbytes("this test").nn.modules)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("Some modules are dispatched on the CPU or the disk", quantizer_bnb_4bit),
        ("Cannot re-initialize CUDA in forked subprocess", torch.cuda),
        ("Token indices sequence length is longer than", transformers.tokenization_utils_base),
    ],
)
def test_a_message_of_another_library_is_said_as_it_says_it(message, where):
    assert f"`{message}`" in PAGE and message in inspect.getsource(where)


def test_formats_that_do_not_meet_have_the_message_of_the_page():
    layer = torch.nn.Linear(2, 2, dtype=torch.float16)
    with pytest.raises(RuntimeError) as refusal:
        layer(torch.ones(1, 2))
    said = re.search(r"- `(mat1 and mat2[^`]*)`", PAGE)[1]
    assert said in str(refusal.value)


def test_grpo_wants_whole_groups(tmp_path):
    trl = pytest.importorskip("trl")
    with pytest.raises(ValueError, match="must be divisible") as stopped:
        trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4)
    assert str(stopped.value).rstrip(".") in PAGE
