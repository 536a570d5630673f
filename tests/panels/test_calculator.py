"""The calculator says in a browser what `memlab.simulate` says in Python, and takes any reader."""

import json
import random
import re
import shlex
from types import SimpleNamespace

import pytest
from contents import ROOT
from helpers import refused
from panel_page import PanelPage
from transformers import TrainingArguments

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
from memlab.panels.packed_tables import has_traces
from memlab.predict.fit import verdict
from memlab.predict.recipe_log import refuse_format
from memlab.predict.simulate import footprint_from_log, sized_log
from memlab.spec.optimizers import is_of_bitsandbytes

GIB = 2**30
# The page is of the releases that its traces were recorded with, and is compared with these.
pytestmark = pytest.mark.usefixtures("attention_of_2_13")
PASTED, BY_SIZE = "a pasted config.json", "another, by its GiB"
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


def test_a_page_made_with_a_newer_pytorch_has_the_kept_traces(monkeypatch):
    """2.14 computes shared keys on a T4 in a kernel of which no trace is kept."""
    before = Calculator(START, "batch_size", gpu="T4").tables()
    monkeypatch.setattr(sdpa, "SHARES_KEYS", sdpa.kernels_that_share_keys("2.14.1"))
    for cached in (names, usual_heads):
        cached.cache_clear()
    assert Calculator(START, "batch_size", gpu="T4").tables() == before


@pytest.fixture(scope="module")
def whole(open_once, calculator):
    return open_once(calculator)


@pytest.fixture
def page(whole):
    """The page with the second example."""
    whole.put(config="")
    whole.click(".presets button", 1)
    return whole


@pytest.fixture
def pages(page, serving):
    """Both calculators, each with an example that fits a T4."""
    serving.put(config="", gpu="T4")
    serving.follow("#serve=llama-3.1-8b&gpu=T4&weights=nf4&prompt=100&new_tokens=5")
    return {"training": page, "serving": serving}


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
    card = find_gpu(gpu).without_limit()
    whole = footprint_from_log(recipe, sized_log(recipe, card), card)
    return pytest.approx(whole.peak_allocated, rel=0.01)


def refusal(settings):
    """The words with which memlab refuses settings, or what it lacks of them; empty for neither."""
    try:
        recipe, card = recipe_of(settings), find_gpu(card_of(settings))
        refuse_format(recipe, card)
    except ValueError as error:
        return str(error)
    return "" if has_traces(recipe, card) else "no trace is kept of"


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
        wanted = refusal(settings)
        if not wanted:
            assert "found" in found, (settings, found)
        elif wanted.startswith("no trace"):
            assert wanted in found and settings["model"] in found
        else:
            by_size = find_gpu(card_of(settings)).name  # which the page calls as it was asked for
            assert found.replace(f"a card of {settings['gib']} GiB", by_size) == wanted
            words.add(wanted.split()[0])
    assert words >= {"precision", "seq_len", "base"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", [0, 1])
def test_its_peak_is_the_simulations_and_nothing_is_falsely_said_to_fit(drawn, part):
    """The order of events, which no sum knows, is all that the page lacks.

    Odd lengths and single sequences have traces of their own, which are recorded here.
    """
    asked = [(settings, found) for settings, found in drawn if not isinstance(found, str)][:24]
    verdicts = set()
    for settings, found in asked[part::2]:
        recipe, card = recipe_of(settings), card_of(settings)
        log, page = sized_log(recipe, find_gpu(card)), found["found"]
        whole = footprint_from_log(recipe, log, find_gpu(card).without_limit())
        there = whole.peak_allocated - whole.breakdown["rounding"]
        here = page["peak_allocated"] - page["breakdown"]["rounding"]
        assert here == pytest.approx(there, rel=0.01), settings
        # Blocks keep remainders of up to 1 MiB, as the order has it; nothing else may be missing.
        most = 1.01 * whole.peak_allocated
        assert 0.99 * there <= page["peak_allocated"] <= most, settings
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
            says = verdict(recipe, log, find_gpu(card))
            assert says.fits == (found["verdict"] == "fits"), settings
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


# ---------------------------------------------------------------------- other models


QWEN, PHI = (
    json.loads(models.config(name).to_json_string(use_diff=False)) for name in ("qwen3-8b", "phi-4")
)
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


def pasted(config):
    return {"config": json.dumps(config), "model": PASTED}


# Small ones, on cards with flash attention and without.
SMALL = {name: value for name, value in LLAMA.items() if name != "rope_scaling"}
SMALL |= {"num_hidden_layers": 3, "hidden_size": 512, "intermediate_size": 1024}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096}
GPT = {"model_type": "gpt2", "n_layer": 3, "n_embd": 512, "n_head": 8, "vocab_size": 16384}
GPT |= {"n_positions": 4096}


# By their widths, of a decoder and of an encoder.
DECODER = {"num_hidden_layers": 18, "hidden_size": 1536, "num_attention_heads": 12}
DECODER |= {"num_key_value_heads": 3, "intermediate_size": 4000, "vocab_size": 50000}
DECODER |= {"max_position_embeddings": 4096}
ENCODER = {"num_hidden_layers": 5, "hidden_size": 640, "num_attention_heads": 10}
ENCODER |= {"intermediate_size": 2048, "vocab_size": 8000, "max_position_embeddings": 640}
LORA = {"trained": "LoRA on a 16-bit base"}


@pytest.mark.parametrize(
    ("asked", "model", "gpu", "more"),
    [
        (pasted(QWEN), "qwen3-8b", "RTX-4090", LORA),
        (pasted(GEMMA), "gemma-3-4b", "T4", LORA),
        (pasted(PHI), "phi-4", "RTX-4090", LORA),
        (pasted(SMALL), SMALL, "T4", {"accumulation": 2}),
        (pasted(SMALL), SMALL, "L4", {}),
        (pasted(GPT), GPT, "V100", {"batch_size": 2}),
        (
            {"model": "a decoder, by its widths"} | DECODER,
            DECODER | {"model_type": "llama"},
            "T4",
            {},
        ),
        (
            {"model": "an encoder, by its widths"} | ENCODER,
            ENCODER | {"model_type": "bert"},
            "T4",
            {},
        ),
    ],
)
def test_another_model_is_what_a_simulation_says(page, asked, model, gpu, more):
    half = {"precision": "bf16-amp" if gpu == "RTX-4090" else "fp16-amp"}
    page.put(**asked, gpu=gpu, **half, **more)
    recipe = recipe_of(page.settings() | {"model": model})
    simulated, found = simulate(recipe, find_gpu(gpu).without_limit()), page.figures()
    within = 5e-3 if isinstance(model, str) else 0.015  # a sum knows no order
    assert found["peak"] == pytest.approx(simulated.peak_allocated, rel=within)
    assert found["parameters"] == simulated.parameters
    assert found["step"] == pytest.approx(simulated.step_time.expected, rel=0.02)
    assert ("Left out of the model: vision." in page.said()) == (model == "gemma-3-4b")


def look_up(page, name, reply):
    """Press the button with a hub that replies so, and no other network; the addresses asked."""
    page.put(model=PASTED)
    page.run(f"""(() => {{
        window.asked = [];
        window.fetch = async (address) => {{ asked.push(address); {reply} }};
        panel.querySelector('.hub').value = {json.dumps(name)};
        panel.querySelector('.hub ~ button').click();
    }})()""")
    return page.after(100, "window.asked")


def test_a_config_is_pasted_or_looked_up_on_the_hub_when_it_is_asked_for(page):
    page.put(model="llama-3.2-1b", precision="bf16", gpu="H100")
    named = page.figures()
    page.put(model=PASTED)
    assert "Paste the config.json" in page.said()
    page.put(config=json.dumps(LLAMA, indent=2))
    assert page.figures() == named and "--config config.json" in page.text(".line")
    page.put(config="")
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


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0: allowed are whole numbers from 1"),
        ({"gpu": BY_SIZE, "gib": "-1"}, "gpu is -1 GiB: allowed are numbers above 0"),
        ({"config": "{", "model": PASTED}, "not a readable JSON file"),
        (pasted(LLAMA | {"model_type": "gpt_neox"}), 'model_type is "gpt_neox": known are bert'),
        (pasted(LLAMA | {"attention_bias": True}), "attention_bias is true, known is false"),
        (pasted(LLAMA | {"num_key_value_heads": 32}), "key-value head are 1, known are several"),
        (pasted(LLAMA | {"rope_scaling": {"type": "dynamic"}}), "rope_parameters"),
        (pasted(LLAMA | {"num_hidden_layers": 0}), "num_hidden_layers is 0: allowed are whole"),
        (pasted(LLAMA | {"num_attention_heads": 31}), "is 31: allowed are divisors of hidden_size"),
        (
            pasted(GEMMA) | {"seq_len": 1024},
            "below its sliding window of 1024: ask memlab simulate",
        ),
        (pasted(PHI | {"num_key_value_heads": 20}), "each key-value head are 2, known are 4"),
        (
            pasted(GEMMA | {"text_config": GEMMA["text_config"] | {"num_hidden_layers": 31}}),
            "it has 31 layers, known are 34",
        ),
        (
            pasted(LLAMA | {"head_dim": 200}) | {"gpu": "L4", "attention": "sdpa"},
            "head size is 200: with sdpa on L4 the formula allows",
        ),
    ],
)
def test_what_it_refuses_it_names(page, values, words):
    page.put(**values)
    assert words in page.said() and "\n" not in page.said()
    assert page.run("panel.querySelector('.answer').hidden")
    assert page.run("panel.querySelector('.say').classList.contains('bad')")
    page.click(".presets button", 1)
    assert page.said().startswith("Fits the T4")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt": 0}, "prompt, tokens is 0: allowed are whole numbers from 1"),
        ({"new_tokens": 999999}, "allows up to"),
        ({"config": "[]", "serve": PASTED}, "model_type is undefined: known are gpt2, llama"),
    ],
)
def test_what_the_calculator_of_inference_refuses_it_names(pages, values, words):
    page = pages["serving"]
    before = page.settings()
    page.put(**values)
    assert words in page.said() and page.run("panel.querySelector('.answer').hidden")
    page.put(**{name: before[name] for name in values})
    assert page.said().startswith("Fits the T4")


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


@pytest.mark.parametrize(
    "values",
    [
        {"checkpointing": "non-reentrant", "batch_size": 64},
        {
            "model": "llama-3-8b",
            "gpu": "RTX-4090",
            "precision": "bf16-amp",
            "trained": "LoRA on NF4",
        },
        {"model": "qwen3-8b", "gpu": "T4"},
    ],
)
def test_the_largest_sizes_fit_and_the_next_ones_may_not(page, values):
    page.put(**values)
    settings, found = page.settings(), page.figures()
    longest = page.run("panel.calculator.known.models")[settings["model"]]["longest"]
    for name, step, most in (("batch_size", 1, 2**20), ("seq_len", 64, longest)):
        sizes = [n for n in (found[name], found[name] + step) if 0 < n <= most]
        answers = in_page(page, [settings | {name: str(n)} for n in sizes])
        fit = [one["verdict"] == "fits" for one in answers]
        assert fit == [True, False][: len(sizes)] or (fit, found[name]) == ([False], 0)


def test_of_what_fits_it_advises_what_is_quicker(page):
    page.put(gpu="A100-80GB", checkpointing="non-reentrant")
    before = page.figures()
    assert "Quicker" in page.text(".first")
    page.click(".tries button")
    assert page.figures()["step"] < before["step"] and page.said().startswith("Fits")
    assert page.settings()["trained"] == "every weight"


# ---------------------------------------------------------------------- what is copied


@pytest.mark.parametrize(
    ("which", "values"),
    [
        ("training", {"model": "gpt2-xl", "gpu": BY_SIZE, "gib": 40, "seq_len": 700,
                      "accumulation": 5, "checkpointing": "non-reentrant", "attention": "eager"}),
        ("training", {"model": "an encoder, by its widths", "hidden_size": 960}),
        ("training", pasted(LLAMA)),
        ("serving", {"serve": "gpt2-xl", "prompt": 321}),
        ("serving", {"serve": PASTED, "config": '{"model_type": "gpt2", "n_layer": 3}',
                     "gpu": BY_SIZE, "gib": "3.5"}),
    ],
)  # fmt: skip
def test_a_link_keeps_the_settings(pages, which, values):
    page = pages[which]
    other = page.settings()
    page.put(**values)
    before, figures, link = page.settings(), page.figures(), page.link()
    page.put(**{name: other[name] for name in reversed(values)})
    assert page.figures() != figures
    page.follow(link)
    assert (page.settings(), page.figures()) == (before, figures)


@pytest.mark.parametrize(
    ("which", "address", "words"),
    [
        ("training", "#model=gpt-7", "model is gpt-7: allowed are"),
        ("training", "#model=gpt2&speed=9", "there is no switch speed"),
        ("training", "#model=gpt2&batch_size=x", "batch_size is x: allowed are numbers"),
        ("serving", "#serve=gpt-7", "model is gpt-7: allowed are gpt2"),
        ("serving", "#serve=gpt2&speed=9", "there is no switch speed"),
    ],
)
def test_a_broken_link_is_told(pages, which, address, words):
    pages[which].follow(address)
    assert words in pages[which].said()


# ---------------------------------------------------------------------- any reader


@pytest.mark.parametrize("which", ["training", "serving"])
def test_a_card_can_be_given_by_its_gib(pages, which):
    page = pages[which]
    page.put(gpu=BY_SIZE, gib="11.5")
    assert "the card of 11.5 GiB" in page.said()
    words = shlex.split(page.text(".line"))
    assert cli.parser().parse_args(words[1:]).gpu == int(11.5 * GIB)
    if which == "training":
        assert page.text("[data-figure=step]") == "name a card for it"


@pytest.mark.parametrize("preset", range(4))
def test_each_example_but_the_first_fits_its_card_and_all_the_phone(page, preset):
    page.click(".presets button", preset)
    assert page.said().startswith("Fits" if preset else "Does not fit")
    page.run("panel.querySelector('details').open = true")
    assert page.tab.run("document.documentElement.scrollWidth") <= 390
    assert page.run("panel.scrollWidth <= panel.clientWidth")
    label = page.run("panel.querySelector('.bar').getAttribute('aria-label')")
    assert "at the peak, in" in label and "parameters" in label


@pytest.mark.parametrize(
    "values",
    [
        {"gpu": "H100", "precision": "bf16-amp", "checkpointing": "non-reentrant"},
        {"accumulation": 4, "optimizer": "sgd", "batch_size": 2},
        {"model": "llama-3-8b", "gpu": "H100", "precision": "bf16-amp", "trained": "LoRA on NF4"},
        {"trained": "LoRA on NF4", "lora_rank": 16},
    ],
)
def test_what_is_copied_means_the_same_training(page, values):
    page.put(**values)
    options = cli.parser().parse_args(shlex.split(page.text(".line"))[1:])
    recipe = cli.options.recipe_of(options)
    assert page.figures()["peak"] == peak_of(recipe, options.gpu)
    text = page.text(".arguments")
    found = eval(text.partition("arguments = ")[2], {"TrainingArguments": dict})
    copied = TrainingArguments(**found, use_cpu=True)
    wanted = recipe.training_arguments(use_cpu=True).to_dict()
    assert copied.to_dict() == wanted | {"report_to": copied.report_to}
    # What is not quantized is loaded in the compute dtype and stays in it, but for a trained head.
    half = {"fp16": "float16", "bf16": "bfloat16"}.get(recipe.compute_dtype)
    parts = {
        f'"{models.MODELS[recipe.model]}"': True,
        f'attn_implementation="{recipe.attention}"': True,
        f"LoraConfig(r={recipe.lora_rank}": recipe.lora_rank > 0,
        "nf4": recipe.base == "nf4",
        f" dtype=torch.{half},": recipe.base != "none",
        "classifier.float()": half == "float16",
        "prepare_model": False,
    }
    assert {part: part in text for part in parts} == parts


def test_the_bar_is_the_breakdown(page):
    page.put(batch_size=64)
    parts, beyond = page.run("""['i:not(.beyond):not(.cache)', '.beyond'].map(kind =>
        [...panel.querySelectorAll(`.bar ${kind}`)].reduce(
            (sum, part) => sum + part.getBoundingClientRect().width, 0)
        / panel.querySelector('.bar').getBoundingClientRect().width)""")
    (answer,) = in_page(page, [page.settings()])
    assert parts == pytest.approx(answer["least"] / answer["most"], abs=0.01)
    assert beyond == pytest.approx(1 - answer["card"]["total"] / answer["most"], abs=0.02)


def test_every_switch_has_its_chapter(page):
    hrefs = page.run("[...panel.querySelectorAll('.switch a')].map(a => a.getAttribute('href'))")
    chapters = ROOT / "chapters"
    stems = [href.removesuffix(".html") for href in hrefs]
    assert page.text(".made").startswith("For torch ")
    assert len(stems) >= 9 and all((chapters / f"{stem}.ipynb").exists() for stem in stems)


def test_a_browser_that_cannot_unpack_says_so(chromium, tmp_path):
    panel = Calculator(Recipe("gpt2", attention="sdpa"), "batch_size")
    old = f"<script>delete DecompressionStream</script>{panel._repr_html_()}"
    page = PanelPage(chromium, tmp_path, SimpleNamespace(_repr_html_=lambda: old))
    assert "browsers from 2023 on" in page.said()
    page.close()


# ---------------------------------------------------------------------- in a chapter


def test_in_a_chapter_it_has_its_few_switches_and_little_data(open_once):
    recipe = Recipe("gpt2", batch_size=4, attention="sdpa", precision="bf16-amp")
    panel = Calculator(recipe, "batch_size", "checkpointing", gpu="L4")
    assert len(panel.data()["packed"]) < 30_000
    in_book = f"<article class='bd-article'>{panel._repr_html_()}</article>"
    page = open_once(SimpleNamespace(_repr_html_=lambda: in_book))
    shown = "[...panel.querySelectorAll('.switch')].filter(one => one.getClientRects().length)"
    names = page.run(f"{shown}.map(one => one.querySelector('[name]').name)")
    assert names == ["batch_size", "checkpointing"]
    for values in ({}, {"batch_size": 9}, {"checkpointing": "non-reentrant"}):
        page.put(**values)
        recipe = recipe.but(**values)
        assert page.figures()["peak"] == peak_of(recipe, "L4")
    assert re.match(r"index\.html#model=gpt2&gpu=L4&batch_size=9&", page.link())
    left_out = "[...panel.querySelectorAll('.whole')].flatMap(part => [...part.getClientRects()])"
    assert page.run(left_out) == []


def test_a_chapter_may_train_what_has_no_name_here(open_once):
    recipe = Recipe("bert-large", batch_size=4, attention="sdpa", precision="bf16-amp", lora_rank=5)
    page = open_once(Calculator(recipe, "lora_rank", "trained", gpu="A10G"))
    assert page.settings()["trained"] == "LoRA" and page.settings()["lora_rank"] == "5"
    assert page.figures()["peak"] == peak_of(recipe, "A10G")
    page.put(trained="every weight")
    assert page.figures()["parameters"] == models.build("bert-large").num_parameters()


@pytest.mark.parametrize(
    ("recipe", "fields", "gpu", "words"),
    [
        (Recipe("gpt2"), ["speed"], "T4", "switch is 'speed': allowed are model, gpu"),
        (Recipe("gpt2"), ["batch_size"], "T5", "gpu is 'T5'"),
        (Recipe("gpt2", freeze="embeddings,2"), ["batch_size"], "T4", "no trace is kept"),
        (Recipe("gpt2-tiny"), ["batch_size"], "T4", "model is 'gpt2-tiny'"),
        (Recipe("gpt2", ranks=2), ["batch_size"], "T4", "ranks is 2: a calculator is for one card"),
        (Recipe("gpt2", precision="bf16"), ["batch_size"], "T4", "no native bfloat16"),
        (Recipe("gpt2", expandable_segments=True), [], "T4", "expandable_segments is True: a calc"),
    ],
)
def test_bad_input_raises(recipe, fields, gpu, words):
    with refused(words):
        Calculator(recipe, *fields, gpu=gpu)


def test_the_page_stays_small(calculator):
    assert len(calculator._repr_html_()) < 450_000  # of the 500 KB of a page
