"""The calculator says in a browser what `memlab.simulate` says in Python, and takes any reader."""

import json
import random
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from panel_page import PanelPage

from memlab import Recipe, cli, fits, models, simulate
from memlab.card.kernels import sdpa
from memlab.gpus import GPUS, find_gpu
from memlab.panels.calculator import (
    CHOICES,
    NUMBERS,
    START,
    TRAINED,
    Calculator,
    names,
    usual_heads,
)
from memlab.panels.packed_tables import is_kept
from memlab.predict.recipe_log import refuse_format
from memlab.predict.shipped import Shipped
from memlab.spec.optimizers import is_of_bitsandbytes

GIB = 2**30
# The page is of the releases that its traces were recorded with, and is compared with these.
pytestmark = pytest.mark.usefixtures("attention_of_2_13")
BY_SIZE = "another, by its GiB"
# As its authors publish it, with names of other releases of transformers.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0},
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}


class CalculatorPage(PanelPage):
    """A page with one calculator, once it has unpacked its tables."""

    def ready(self):
        self.run("new Promise(done => { const look = () => panel.calculator ? done() : "
                 "setTimeout(look, 20); look(); })")  # fmt: skip
        return self

    def settings(self):
        fields = "[...panel.querySelectorAll('[name]')]"
        return self.run(f"Object.fromEntries({fields}.map(field => [field.name, field.value]))")

    def put(self, **values):
        for name, value in values.items():
            self.set(name, str(value))

    def link(self):
        return self.run("panel.querySelector('.links a').getAttribute('href')")

    def said(self):
        return self.text(".say")

    def reach(self, selector):
        """The middle of an element, which is scrolled to."""
        return self.run(f"""(() => {{
            const one = panel.querySelector({json.dumps(selector)});
            one.scrollIntoView({{ block: 'center' }});
            const box = one.getBoundingClientRect();
            return {{ x: box.x + box.width / 2, y: box.y + box.height / 2 }};
        }})()""")


@pytest.fixture(scope="module")
def calculator():
    """Its page, made once: the tables of all models take most of a minute."""
    page = Calculator()._repr_html_()
    return SimpleNamespace(_repr_html_=lambda: page)


def test_a_page_made_with_a_newer_pytorch_has_the_kept_traces(monkeypatch):
    """2.14 computes shared keys on a T4 in a kernel of which no trace is kept."""
    before = Calculator(START, "batch_size", gpu="T4").known()
    monkeypatch.setattr(sdpa, "SHARES_KEYS", sdpa.kernels_that_share_keys("2.14.1"))
    for cached in (names, usual_heads):
        cached.cache_clear()
    assert Calculator(START, "batch_size", gpu="T4").known() == before


@pytest.fixture(scope="module")
def whole(chromium, tmp_path_factory, calculator):
    page = CalculatorPage(chromium, tmp_path_factory.mktemp("calculator"), calculator).ready()
    page.began = page.link()
    yield page
    page.close()


@pytest.fixture
def page(whole):
    """The page with the second example."""
    whole.put(config="")
    whole.click(".presets button", 1)
    return whole


# ---------------------------------------------------------------------- as Python


def card_of(settings):
    """The card's name, or its bytes."""
    by_size = settings["gpu"] == BY_SIZE
    return int(float(settings["gib"]) * GIB) if by_size else settings["gpu"]


def recipe_of(settings):
    """What settings mean; raises ValueError as `Recipe` does."""
    values = {name: settings[name] for name in ("model", *CHOICES)}
    values |= {name: int(settings[name]) for name in NUMBERS[:3]}
    trained = TRAINED[settings["trained"]]
    values |= trained | (
        {"lora_rank": int(settings["lora_rank"])} if "lora_rank" in trained else {}
    )
    return Recipe(**values)


def peak_of(recipe, gpu):
    """What a simulation says, as near as a sum without an order comes."""
    whole = simulate(recipe, find_gpu(gpu).without_limit())
    return pytest.approx(whole.peak_allocated, rel=0.01)


def refused(settings):
    """The words with which memlab refuses settings, or what it lacks of them; empty for neither."""
    try:
        recipe, card = recipe_of(settings), find_gpu(card_of(settings))
        refuse_format(recipe, card)
    except ValueError as error:
        return str(error)
    return "" if is_kept(recipe, card) else "no trace is kept of"


def in_page(page, asked):
    """What the page answers to a list of settings."""
    return page.run(f"""{json.dumps(asked)}.map(settings => {{
        try {{ return panel.calculator.answer(settings); }}
        catch (error) {{ return error.message; }}
    }})""")


def drawn_settings(page, number, seed=3):
    """Settings that the switches can have, with sizes that a reader may type."""
    known, draw, found = page.run("panel.calculator.known"), random.Random(seed), []
    while len(found) < number:
        model = draw.choice(list(known["models"]))
        longest = min(known["models"][model]["longest"] or 4096, 8192)
        settings = {name: draw.choice(choices) for name, choices in known["choices"].items()}
        settings |= {
            "model": model,
            "gpu": draw.choice([*GPUS, BY_SIZE]),
            "gib": draw.choice([8, 24, 95.5]),
            "batch_size": draw.choice([1, 2, 3, 8, 17, 64]),
            "seq_len": draw.randint(1, longest + longest // 8),
            "accumulation": draw.choice([1, 1, 2, 16]),
            "lora_rank": draw.choice([1, 8, 13, 64]),
        }
        found.append({name: str(value) for name, value in settings.items()})
    return found


@pytest.fixture(scope="module")
def drawn(whole):
    """Pairs of settings and what the page answers to them."""
    asked = drawn_settings(whole, 300)
    return list(zip(asked, in_page(whole, asked), strict=True))


def test_it_refuses_what_python_refuses(drawn):
    words = set()
    for settings, found in drawn:
        wanted = refused(settings)
        if not wanted:
            assert "found" in found, (settings, found)
        elif wanted.startswith("no trace"):
            assert wanted in found and settings["model"] in found
        else:
            by_size = find_gpu(card_of(settings)).name  # which the page calls as it was asked for
            assert found.replace(f"a card of {settings['gib']} GiB", by_size) == wanted
            words.add(wanted.split()[0])
    assert words >= {"precision", "seq_len", "base"}


def test_its_peak_is_the_simulations_and_nothing_is_falsely_said_to_fit(drawn):
    """The order of events, which no sum knows, is all that the page lacks."""
    asked = [(settings, found) for settings, found in drawn if not isinstance(found, str)][:24]
    verdicts = set()
    for settings, found in asked:
        recipe, card = recipe_of(settings), card_of(settings)
        whole, page = simulate(recipe, find_gpu(card).without_limit()), found["found"]
        assert page["peak_allocated"] == pytest.approx(whole.peak_allocated, rel=0.01), settings
        assert page["parameters"] == whole.parameters
        assert page["trainable_parameters"] == whole.trainable_parameters
        for name in ("parameters", "optimizer_states", "activations"):
            off = page["breakdown"][name] - whole.breakdown[name]
            assert abs(off) <= 0.005 * whole.peak_allocated, (name, settings)
        if find_gpu(card).bandwidth:
            expected = whole.step_seconds.expected
            # The page takes wide models' 8-bit states, whose steps take the host longer.
            within = 0.15 if is_of_bitsandbytes(recipe.optimizer) else 0.01
            found_time = page["step_time"]["expected"]
            assert found_time == pytest.approx(expected, rel=within), settings
        if found["verdict"] != "may fit":
            assert fits(recipe, card).fits == (found["verdict"] == "fits"), settings
        verdicts.add(found["verdict"])
    assert verdicts >= {"fits", "does not fit"}


@pytest.mark.slow
def test_the_largest_micro_batch_that_it_says_fits_does_so(whole):
    """Random borders, where sums without an order are most likely to be wrong."""
    asked = drawn_settings(whole, 400, seed=5)
    largest = whole.run(f"""{json.dumps(asked)}.map(settings => {{
        const at = (batch) => ({{ ...settings, batch_size: String(batch) }});
        try {{
            let fits = 0, over = 4097;
            while (over - fits > 1) {{
                const middle = Math.floor((fits + over) / 2);
                if (panel.calculator.answer(at(middle)).verdict === "fits") fits = middle;
                else over = middle;
            }}
            return fits;
        }} catch (error) {{ return 0; }}
    }})""")
    borders = [(one | {"batch_size": str(n)}) for one, n in zip(asked, largest, strict=True) if n]
    untrue = [one for one in borders if not fits(recipe_of(one), card_of(one))]
    # Most settings are refused, or fit no card at all.
    assert len(borders) >= 40 and not untrue, untrue


@pytest.mark.parametrize(("gpu", "shared"), [("T4", True), ("V100", False), ("L4", True)])
def test_it_says_what_is_simulated(page, gpu, shared):
    """The page is not only Python's twin: of cards with flash attention and without."""
    values = LLAMA | {"num_hidden_layers": 3, "hidden_size": 512, "intermediate_size": 1024}
    values |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096}
    del values["rope_scaling"]
    if not shared:
        values = {"model_type": "gpt2", "n_layer": 3, "n_embd": 512, "n_head": 8}
        values |= {"n_positions": 4096, "vocab_size": 16384}
    how = {"batch_size": 2, "seq_len": 1024, "precision": "fp16-amp", "attention": "sdpa"}
    how |= {"optimizer": "adamw_torch"}
    page.put(model="a pasted config.json", config=json.dumps(values), gpu=gpu, **how)
    (found,) = in_page(page, [page.settings()])
    whole = simulate(Recipe(values, **how), gpu)
    assert found["found"]["peak_allocated"] == pytest.approx(whole.peak_allocated, rel=0.01)
    for name in ("parameters", "optimizer_states", "activations"):
        assert found["found"]["breakdown"][name] == pytest.approx(whole.breakdown[name], rel=1e-3)
    expected = whole.step_seconds.expected
    assert found["found"]["step_time"]["expected"] == pytest.approx(expected, rel=0.02)


def test_what_keys_need_that_heads_share_is_not_said_to_fit(page):
    """Llama 3.2 1B, LoRA, 1,792 tokens: 20,923 MiB on a T4, which has no flash attention."""
    page.put(model="llama-3.2-1b", gpu="T4", trained="LoRA", precision="fp16-amp", batch_size=1,
             seq_len=1792, accumulation=1, attention="sdpa", optimizer="adamw_torch",
             checkpointing="none")  # fmt: skip
    assert page.said().startswith("Does not fit the T4: 5.")
    page.put(gpu="RTX-4090")
    assert page.said().startswith("Fits the RTX-4090")


def test_a_head_that_other_kernels_take_is_refused_by_name(page):
    values = LLAMA | {"head_dim": 200}
    page.put(model="a pasted config.json", config=json.dumps(values), gpu="L4", attention="sdpa")
    assert page.said().startswith("head size is 200: with sdpa on L4 the formula allows")


def test_it_says_of_which_releases_it_is(page):
    assert f"torch {Shipped.of_memlab().versions['torch']}, transformers" in page.text(".made")


# ---------------------------------------------------------------------- other models


def test_a_pasted_config_is_the_named_model(page):
    page.put(model="llama-3.2-1b", precision="bf16", gpu="H100")
    named = page.figures()
    page.put(model="a pasted config.json")
    assert "Paste the config.json" in page.said()
    page.put(config=json.dumps(LLAMA, indent=2))
    assert page.figures() == named
    assert "--config config.json" in page.text(".line")


QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Text and vision; the text says only where it differs from its class.
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "model_type": "phi3",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "vocab_size": 100352,
}


@pytest.mark.parametrize(
    ("config", "model", "gpu"),
    [(QWEN, "qwen3-8b", "RTX-4090"), (GEMMA, "gemma-3-4b", "T4"), (PHI, "phi-4", "RTX-4090")],
)
def test_a_pasted_config_is_what_a_simulation_says(page, config, model, gpu):
    half = "fp16-amp" if gpu == "T4" else "bf16-amp"
    page.put(model="a pasted config.json", config=json.dumps(config), gpu=gpu, seq_len=512)
    page.put(trained="LoRA on a 16-bit base", precision=half, batch_size=2, accumulation=2)
    settings = page.settings() | {"model": model}
    said, card = page.figures()["peak"], find_gpu(gpu).without_limit()
    simulated = simulate(recipe_of(settings), card).peak_allocated
    assert said == pytest.approx(simulated, rel=5e-3)  # a sum knows no order
    assert ("Left out of the model: vision." in page.said()) == (config is GEMMA)


def test_a_config_beyond_its_window_is_sent_to_the_command_line(page):
    page.put(model="a pasted config.json", config=json.dumps(GEMMA), seq_len=1024)
    assert "only below its sliding window of 1024: ask memlab simulate" in page.said()


def test_a_config_of_other_layers_says_so(page):
    deeper = GEMMA | {"text_config": GEMMA["text_config"] | {"num_hidden_layers": 31}}
    page.put(model="a pasted config.json", config=json.dumps(deeper))
    assert "it has 31 layers, known are 34" in page.said()
    shared = PHI | {"num_attention_heads": 40, "num_key_value_heads": 20}
    page.put(config=json.dumps(shared))
    assert "heads for each key-value head are 2, known are 4" in page.said()


def look_up(page, name, reply):
    """Press the button with a hub that replies so, and no other network; the addresses asked."""
    page.put(model="a pasted config.json")
    page.run(f"""(() => {{
        window.asked = [];
        window.fetch = async (address) => {{ asked.push(address); {reply} }};
        panel.querySelector('.hub').value = {json.dumps(name)};
        panel.querySelector('.hub ~ button').click();
    }})()""")
    return page.run("new Promise(done => setTimeout(() => done(window.asked), 100))")


def test_a_config_is_looked_up_on_the_hub_when_it_is_asked_for(page):
    page.put(model="llama-3.2-1b", precision="bf16", gpu="H100")
    named = page.figures()
    text = json.dumps(json.dumps(LLAMA))
    asked = look_up(page, "meta-llama/Llama-3.2-1B", f"return new Response({text});")
    address = "https://huggingface.co/meta-llama/Llama-3.2-1B/resolve/main/config.json"
    assert asked == [address] and page.figures() == named


@pytest.mark.parametrize(
    ("name", "reply", "words"),
    [
        ("a/b", "throw new TypeError('offline');", "no config.json of a/b (no network): paste it"),
        ("a/b", "return new Response('', {status: 401});", "no config.json of a/b (status 401)"),
        ("Qwen3", "", "the name on the hub is Qwen3: allowed are names such as Qwen/Qwen3-8B"),
    ],
)
def test_a_hub_without_an_answer_is_told(page, name, reply, words):
    look_up(page, name, reply)
    assert words in page.said()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neox"}, 'model_type is "gpt_neox": known are bert'),
        ({"attention_bias": True}, "attention_bias is true, known is false"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", known is "silu"'),
        ({"num_key_value_heads": 32}, "heads for each key-value head are 1, known are several"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_parameters"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: allowed are whole numbers from 1"),
        ({"vocab_size": "many"}, "vocab_size is many: allowed are whole numbers"),
        (
            {"num_attention_heads": 31},
            "num_attention_heads is 31: allowed are divisors of hidden_size",
        ),
    ],
)
def test_an_unknown_config_is_refused_by_name(page, changes, words):
    page.put(model="a pasted config.json", config=json.dumps(LLAMA | changes))
    assert words in page.said() and "\n" not in page.said()
    assert page.run("panel.querySelector('.answer').hidden")


@pytest.mark.parametrize("text", ["{", "[1]", "3", "null"])
def test_what_is_no_config_is_refused(page, text):
    page.put(model="a pasted config.json", config=text)
    assert "not a readable JSON file" in page.said() or "model_type is undefined" in page.said()


@pytest.mark.parametrize(
    ("kind", "widths", "rest"),
    [
        (
            "a decoder, by its widths",
            {"num_hidden_layers": 18, "hidden_size": 1536, "num_attention_heads": 12,
             "num_key_value_heads": 3, "intermediate_size": 4000, "vocab_size": 50000,
             "max_position_embeddings": 4096},
            {"model_type": "llama"},
        ),
        (
            "an encoder, by its widths",
            {"num_hidden_layers": 5, "hidden_size": 640, "num_attention_heads": 10,
             "intermediate_size": 2048, "vocab_size": 8000, "max_position_embeddings": 640},
            {"model_type": "bert"},
        ),
    ],
)  # fmt: skip
def test_a_model_by_its_widths(page, kind, widths, rest):
    page.put(model=kind, **widths)
    recipe = Recipe(
        widths | rest, batch_size=8, precision="fp16-amp", attention="sdpa",
        optimizer="adamw_torch_fused",
    )  # fmt: skip
    wanted, found = simulate(recipe, find_gpu("T4").without_limit()), page.figures()
    assert found["peak"] == pytest.approx(wanted.peak_allocated, rel=0.015)
    assert found["parameters"] == wanted.parameters
    assert found["step"] == pytest.approx(wanted.step_time.expected, rel=0.02)
    assert "million" in page.text("[data-figure=parameters]")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"precision": "bf16-amp"}, "T4 has no native bfloat16 and allows fp32"),
        ({"seq_len": 513}, "bert-large allows whole numbers from 1 to 512"),
        ({"batch_size": 0}, "batch_size is 0: allowed are whole numbers from 1"),
        ({"accumulation": "1.5"}, "accumulation is 1.5"),
        ({"batch_size": ""}, "batch_size is empty"),
        ({"gpu": BY_SIZE, "gib": "-1"}, "gpu is -1 GiB: allowed are numbers above 0"),
        ({"precision": "fp32", "trained": "LoRA on NF4"}, "no trace is kept of bert-large"),
    ],
)
def test_what_it_refuses_it_names(page, values, words):
    page.put(**values)
    assert words in page.said()
    assert page.run("panel.querySelector('.answer').hidden")
    assert page.run("panel.querySelector('.say').classList.contains('bad')")
    page.click(".presets button", 1)
    assert page.said().startswith("Fits the T4")


def test_a_number_of_gib_is_a_card_without_seconds(page):
    page.put(gpu=BY_SIZE, gib="11.5")
    recipe = Recipe("bert-large", batch_size=8, precision="fp16-amp", attention="sdpa")
    recipe = recipe.but(optimizer="adamw_torch_fused")
    assert page.figures()["peak"] == peak_of(recipe, int(11.5 * GIB))
    assert page.text("[data-figure=step]") == "name a card for it"
    assert f"--gpu {int(11.5 * GIB)}" in page.text(".line")


# ---------------------------------------------------------------------- what it advises


def test_the_first_changes_make_it_fit_if_one_can(page):
    page.put(batch_size=32)
    assert page.said().startswith("Does not fit the T4")
    before = page.figures()
    verdict, less = page.run("panel.querySelector('.tries li').lastChild.textContent").split(": ")
    assert page.run("panel.querySelectorAll('.tries li').length") == 5
    page.click(".tries button")
    assert page.said().lower().startswith(f"{verdict} the t4")
    saved = (before["peak"] - page.figures()["peak"]) / GIB
    assert float(less.split()[1]) == pytest.approx(saved, abs=0.06) and less.endswith(" a step")


def test_it_begins_with_what_does_not_fit_and_two_changes_that_help(page):
    page.click(".presets button")
    assert page.link() == page.began
    assert page.said().startswith("Does not fit the T4")
    assert page.text("[data-figure=batch_size]").startswith("perhaps ")
    for change in ("checkpointing: non-reentrant", "micro-batch: 1, accumulation: 8"):
        names = page.run("[...panel.querySelectorAll('.tries button')].map(b => b.textContent)")
        page.click(".tries button", names.index(change))
    assert page.said().startswith("Fits the T4")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"checkpointing": "non-reentrant", "batch_size": 64},
        {"model": "llama-3-8b", "gpu": "RTX-4090", "precision": "bf16-amp", "batch_size": 3,
         "trained": "LoRA on NF4"},
        {"model": "qwen3-8b", "gpu": "T4"},
    ],
)  # fmt: skip
def test_the_largest_sizes_fit_and_the_next_ones_may_not(page, values):
    page.put(**values)
    settings, found = page.settings(), page.figures()
    longest = page.run("panel.calculator.known.models")[settings["model"]]["longest"]
    for name, step in (("batch_size", 1), ("seq_len", 64)):
        value = found[name]
        sizes = [n for n in (value, value + step) if 0 < n and (name != "seq_len" or n <= longest)]
        answers = in_page(page, [settings | {name: str(n)} for n in sizes])
        assert [one["verdict"] == "fits" for one in answers] == [n == value for n in sizes]


def test_of_what_fits_it_advises_what_is_quicker(page):
    page.put(gpu="A100-80GB", checkpointing="non-reentrant")
    before = page.figures()
    assert "Quicker" in page.text(".first")
    page.click(".tries button")
    assert page.figures()["step"] < before["step"] and page.said().startswith("Fits")
    assert page.settings()["trained"] == "every weight"


# ---------------------------------------------------------------------- what is copied


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"gpu": "H100", "precision": "bf16-amp", "checkpointing": "non-reentrant"},
        {"accumulation": 4, "optimizer": "sgd", "batch_size": 2},
        {"model": "llama-3-8b", "gpu": "H100", "precision": "bf16-amp", "trained": "LoRA on NF4",
         "lora_rank": 16},
        {"trained": "LoRA on NF4", "lora_rank": 16},
    ],
)  # fmt: skip
def test_what_is_copied_means_the_same_training(page, values):
    page.put(**values)
    line = shlex.split(page.text(".line"))
    assert line[0] == "memlab"
    options = cli.parser().parse_args(line[1:])
    recipe = cli.options.recipe_of(options)
    assert page.figures()["peak"] == peak_of(recipe, options.gpu)

    transformers = pytest.importorskip("transformers")
    text = page.text(".arguments")
    arguments = text[text.index("arguments = ") + len("arguments = ") :]
    found = eval(arguments, {"TrainingArguments": dict})
    wanted = recipe.training_arguments(use_cpu=True)
    there = transformers.TrainingArguments(**found, use_cpu=True)
    assert there.to_dict() == wanted.to_dict() | {"report_to": there.report_to}
    assert f'"{models.MODELS[recipe.model]}"' in text
    assert f'attn_implementation="{recipe.attention}"' in text
    assert ("LoraConfig(r=16" in text) == (recipe.lora_rank == 16)
    assert ("nf4" in text) == (recipe.base == "nf4")
    # What is not quantized is loaded in the compute dtype and stays in it, but for a trained head.
    half = {"fp16": "float16", "bf16": "bfloat16"}.get(recipe.compute_dtype)
    assert recipe.base == "none" or f" dtype=torch.{half}," in text
    assert "prepare_model" not in text
    assert ("classifier.float()" in text) == (half == "float16")


def test_a_link_keeps_the_settings(page):
    page.put(model="gpt2-xl", gpu=BY_SIZE, gib="40", batch_size=3, seq_len=700, accumulation=5)
    page.put(checkpointing="non-reentrant", attention="eager")
    before, figures = page.settings(), page.figures()
    link = page.link()
    page.click(".presets button", 3)
    assert page.settings() != before
    page.tab.run(f"location.hash = {json.dumps(link)}; new Promise(done => setTimeout(done, 50))")
    assert page.settings() == before and page.figures() == figures


def test_a_link_keeps_a_model_by_its_widths_and_a_pasted_one(page):
    for values in (
        {"model": "an encoder, by its widths", "hidden_size": 960, "num_hidden_layers": 7},
        {"model": "a pasted config.json", "config": json.dumps(LLAMA)},
    ):
        page.click(".presets button", 1)
        page.put(**values)
        figures = page.figures()
        link = page.link()
        page.click(".presets button", 2)
        page.tab.run(
            f"location.hash = {json.dumps(link)}; new Promise(done => setTimeout(done, 50))"
        )
        assert page.figures() == figures


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("#model=gpt-7", "model is gpt-7: allowed are"),
        ("#model=gpt2&precision=fp8", "precision is fp8: allowed are fp32"),
        ("#model=gpt2&speed=9", "there is no switch speed"),
        ("#model=gpt2&batch_size=x", "batch_size is x: allowed are numbers"),
    ],
)
def test_a_broken_link_is_told(page, address, words):
    page.tab.run(f"location.hash = '{address}'; new Promise(done => setTimeout(done, 50))")
    assert words in page.said()


# ---------------------------------------------------------------------- any reader


def test_by_keyboard(page):
    page.put(gpu="H100")
    page.run("panel.querySelector('[name=precision]').focus()")
    before = page.settings()["precision"]
    for kind in ("keyDown", "keyUp"):
        page.tab.send("Input.dispatchKeyEvent", type=kind, key="ArrowDown", code="ArrowDown",
                      windowsVirtualKeyCode=40)  # fmt: skip
    assert page.settings()["precision"] != before
    assert page.said().startswith("Fits the H100")
    page.run("panel.querySelectorAll('.presets button')[2].focus()")
    for kind in ("keyDown", "keyUp"):
        page.tab.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r",
                      windowsVirtualKeyCode=13)  # fmt: skip
    assert page.settings()["gpu"] == "RTX-4090"


def test_by_touch(page):
    place = page.reach(".presets button:last-child")
    page.tab.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[place])
    page.tab.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.run("new Promise(done => setTimeout(done, 50))")
    assert page.settings()["gpu"] == "H100"


@pytest.mark.parametrize("preset", range(4))
def test_each_example_but_the_first_fits_its_card_and_all_the_phone(page, preset):
    page.click(".presets button", preset)
    assert page.said().startswith("Fits" if preset else "Does not fit")
    page.run("panel.querySelector('details').open = true")
    assert page.tab.run("document.documentElement.scrollWidth") <= 390
    assert page.run("panel.scrollWidth <= panel.clientWidth")
    label = page.run("panel.querySelector('.bar').getAttribute('aria-label')")
    assert "at the peak, in" in label and "parameters" in label


def test_the_bar_is_the_breakdown(page):
    page.put(batch_size=64)
    widths = page.run("""(() => {
        const whole = panel.querySelector('.bar').getBoundingClientRect();
        const beyond = panel.querySelector('.bar .beyond').getBoundingClientRect();
        const parts = [...panel.querySelectorAll('.bar i:not(.beyond):not(.cache)')];
        const sum = parts.reduce((a, one) => a + one.getBoundingClientRect().width, 0);
        return [sum / whole.width, beyond.width / whole.width];
    })()""")
    answer = in_page(page, [page.settings()])[0]
    most, card = answer["most"], answer["card"]
    assert widths[0] == pytest.approx(answer["least"] / most, abs=0.01)
    assert widths[1] == pytest.approx(1 - card["total"] / most, abs=0.02)


def test_every_switch_has_its_chapter(page):
    hrefs = page.run("[...panel.querySelectorAll('.switch a')].map(a => a.getAttribute('href'))")
    chapters = Path(__file__).parents[2] / "chapters"
    stems = [href.removesuffix(".html") for href in hrefs]
    assert len(stems) >= 9 and all((chapters / f"{stem}.ipynb").exists() for stem in stems)


def test_a_browser_that_cannot_unpack_says_so(chromium, tmp_path):
    panel = Calculator(Recipe("gpt2", attention="sdpa"), "batch_size")
    page = CalculatorPage(chromium, tmp_path, SimpleNamespace(
        _repr_html_=lambda: f"<script>delete DecompressionStream</script>{panel._repr_html_()}"
    ))  # fmt: skip
    assert "browsers from 2023 on" in page.said()
    page.close()


# ---------------------------------------------------------------------- in a chapter


def test_in_a_chapter_it_has_its_few_switches_and_little_data(chromium, tmp_path):
    recipe = Recipe("gpt2", batch_size=4, attention="sdpa", precision="bf16-amp")
    panel = Calculator(recipe, "batch_size", "checkpointing", gpu="L4")
    assert len(panel.data()["packed"]) < 30_000
    in_book = f"<article class='bd-article'>{panel._repr_html_()}</article>"
    show = SimpleNamespace(_repr_html_=lambda: in_book)
    page = CalculatorPage(chromium, tmp_path, show).ready()
    shown = "[...panel.querySelectorAll('.switch')].filter(one => one.getClientRects().length)"
    assert page.run(f"{shown}.map(one => one.querySelector('[name]').name)") == [
        "batch_size",
        "checkpointing",
    ]
    for values in ({}, {"batch_size": 9}, {"checkpointing": "non-reentrant"}):
        page.put(**values)
        recipe = recipe.but(**values)
        assert page.figures()["peak"] == peak_of(recipe, "L4")
    href = page.link()
    assert re.match(r"index\.html#model=gpt2&gpu=L4&batch_size=9&", href)
    assert (
        page.run(
            "[...panel.querySelectorAll('.whole')].flatMap(part => [...part.getClientRects()])"
        )
        == []
    )
    page.close()


def test_a_chapter_may_train_what_has_no_name_here(chromium, tmp_path):
    recipe = Recipe("bert-large", batch_size=4, attention="sdpa", precision="bf16-amp", lora_rank=5)
    panel = Calculator(recipe, "lora_rank", "trained", gpu="A10G")
    page = CalculatorPage(chromium, tmp_path, panel).ready()
    assert page.settings()["trained"] == "LoRA" and page.settings()["lora_rank"] == "5"
    assert page.figures()["peak"] == peak_of(recipe, "A10G")
    page.put(trained="every weight")
    assert page.figures()["parameters"] == models.build("bert-large").num_parameters()
    page.close()


@pytest.mark.parametrize(
    ("recipe", "fields", "gpu", "words"),
    [
        (Recipe("gpt2"), ["speed"], "T4", "switch is 'speed': allowed are model, gpu"),
        (Recipe("gpt2"), ["batch_size"], "T5", "gpu is 'T5'"),
        (Recipe("gpt2", freeze="embeddings,2"), ["batch_size"], "T4", "no trace is kept"),
        (Recipe("gpt2", padded=True), ["batch_size"], "T4", "no trace is kept"),
        (Recipe("gpt2-tiny"), ["batch_size"], "T4", "model is 'gpt2-tiny'"),
        (Recipe("gpt2", ranks=2), ["batch_size"], "T4", "ranks is 2: a calculator is of one card"),
        (Recipe("gpt2", precision="bf16"), ["batch_size"], "T4", "no native bfloat16"),
        (Recipe("gpt2", expandable_segments=True), [], "T4", "expandable_segments is True: a calc"),
    ],
)
def test_bad_input_raises(recipe, fields, gpu, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        Calculator(recipe, *fields, gpu=gpu)
    assert "\n" not in str(error.value)


def test_the_page_stays_small(calculator):
    assert len(calculator._repr_html_()) < 400_000  # of the page's 500 KB
