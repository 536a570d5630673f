"""The page on troubles: its figures are what shapes give; its names, defaults and anchors exist."""

import dataclasses
import html
import inspect
import json
import math
import pickle
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import accelerate
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
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
# What other pages and texts lead to.
ANCHORS = """out-of-memory-at-the-start out-of-memory-after-an-hour evaluation saving
    loss-looks-wrong resume checkpoints-on-disk host-memory allocator-variable compile
    errors-of-activation-checkpointing preference-training new-tokens optimizer-on-the-host
    old-and-new-cards amd-and-apple changed-names""".split()


def slug(heading):
    """The anchor of a heading, as myst-parser makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors_of(file):
    """The headings' anchors of a page, of its three highest levels."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#{1,3} (.+)$", plain, re.MULTILINE)}


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


def test_a_merge_of_eight_billion_weights_is_more_than_a_t4_has(known):
    assert known["weights"] * 2 > find_gpu("T4").total_memory


def test_the_optimizers_traffic_is_that_of_the_links_table(known):
    """Gradients down and weights up, over the link that the page names."""
    links = json.loads((ROOT / "memlab" / "data" / "links.json").read_text())["pcie"]
    rates = links["gb_per_second"]
    assert (rates["RTX-4090"], rates["T4"]) == (31.5, 15.75)
    assert "the 31.5 GB a second\nthat 16 lanes of PCI Express 4.0" in PAGE
    assert round(450 / rates["RTX-4090"]) == 14 and "each way, 14 times as many" in PAGE


@pytest.mark.filterwarnings("ignore")
def test_a_base_in_the_hosts_memory_is_not_moved_by_its_adapters(tmp_path):
    """peft moves what has a device map with "cpu" in it; a base that lies there whole has none."""
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=100)
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert getattr(base, "hf_device_map", None) is None


@pytest.mark.parametrize("expression, said", sorted(set(FIGURES)))
def test_a_figure_is_what_the_shapes_give(expression, said, known):
    assert eval(html.unescape(expression), known) == said


def test_counted_bytes_are_figures():
    """No counted GiB or MiB stands in the text by hand."""
    plain = re.sub(r"^```.*?^```", "", FIGURE.sub("", PAGE), flags=re.MULTILINE | re.DOTALL)
    assert len(FIGURES) > 12 and re.findall(r"\d\s(?:GiB|MiB)", plain) == []


def test_the_anchors_are_there():
    assert set(ANCHORS) <= anchors_of(CHAPTERS / "troubleshooting.md")


def test_links_lead_to_headings():
    links = re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", PAGE)
    links = [(page or "troubleshooting.md", anchor) for page, anchor in links]
    wanted = {(page, anchor) for page, anchor in links if page != "references.md"}
    assert len(wanted) > 20
    assert [one for one in wanted if one[1] not in anchors_of(CHAPTERS / one[0])] == []


def test_links_of_other_pages_lead_here():
    pages = [*CHAPTERS.glob("*.md"), *CHAPTERS.glob("*.ipynb")]
    named = {
        anchor
        for page in pages
        for anchor in re.findall(
            r"\(troubleshooting\.md#([\w-]+)\)", page.read_text(encoding="utf-8")
        )
    }
    assert named and named <= set(ANCHORS)


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


def test_random_states_of_an_older_numpy_are_refused_and_not_missed(tmp_path):
    """Those that NumPy 1 wrote name its modules as they were called then."""
    said, states = tmp_path / "new.pth", {"numpy": np.random.get_state()}
    torch.save(states, said)
    trainer = SimpleNamespace(args=SimpleNamespace(world_size=1))
    transformers.Trainer._load_rng_state(trainer, str(tmp_path))  # no file of that name
    with zipfile.ZipFile(said) as new, zipfile.ZipFile(tmp_path / "rng_state.pth", "w") as old:
        for name in new.namelist():
            old.writestr(name, new.read(name).replace(b"numpy._core.", b"numpy.core."))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        transformers.Trainer._load_rng_state(trainer, str(tmp_path))


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


def test_a_schedule_takes_its_length_from_the_new_arguments():
    weight = torch.nn.Parameter(torch.zeros(1))
    once, twice = (torch.optim.SGD([weight], lr=1.0) for _ in range(2))
    first, second = (
        transformers.get_scheduler("linear", one, 0, steps)
        for one, steps in ((once, 100), (twice, 200))
    )
    for _ in range(100):
        once.step()
        first.step()
    assert first.get_last_lr() == [0.0]
    second.load_state_dict(first.state_dict())
    second.step()
    assert second.get_last_lr()[0] == pytest.approx(0.5, abs=0.01)


def tensors_in_the_file(folder, embeddings, **trained):
    """The whole matrices in the file of adapters beside a vocabulary that grew, and other rows."""
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=100)
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(104)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], **trained))
    model.save_pretrained(folder / "adapters", save_embedding_layers=embeddings)
    held = load_file(folder / "adapters" / "adapter_model.safetensors")
    rows = [len(held[name]) for name in held if "lora_" not in name]
    return rows.count(104), [n for n in rows if n != 104]


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_adapters_after_a_resize_has_whole_matrices(tmp_path):
    both = ["embed_tokens", "lm_head"]
    new = {"trainable_token_indices": dict.fromkeys(both, [100, 101])}
    assert tensors_in_the_file(tmp_path, "auto", **new) == (2, [2, 2])
    assert tensors_in_the_file(tmp_path, False, **new) == (0, [2, 2])
    copies = {"modules_to_save": both}
    assert tensors_in_the_file(tmp_path, "auto", **copies) == (6, [])
    assert tensors_in_the_file(tmp_path, False, **copies) == (2, [])
