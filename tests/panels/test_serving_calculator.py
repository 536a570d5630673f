"""The calculator of inference says in a browser what `memlab.simulate` says of a serving."""

import json
import random
import re
import shlex

import pytest
from panel_page import PanelPage

from memlab import cli, fits, models, simulate
from memlab.card.kernels import sdpa
from memlab.gpus import GPUS, find_gpu
from memlab.panels.serving_calculator import BYTES, FIELDS, HELD, NAMES, TYPES, ServingCalculator
from memlab.spec.serving import Serving
from memlab.trace.patches import replaced

# Kernels of one release, on the page and in the simulation, whichever is here.
pytestmark = pytest.mark.usefixtures("attention_of_2_13")
PASTED, BY_SIZE = "a pasted config.json", "another, by its GiB"


@pytest.fixture(scope="module")
def page(chromium, tmp_path_factory):
    with replaced((sdpa, "SHARES_KEYS", sdpa.kernels_that_share_keys("2.13.0"))):
        page = PanelPage(chromium, tmp_path_factory.mktemp("serving"), ServingCalculator())
    yield page
    page.close()


def settings(page):
    return dict(page.run("[...panel.querySelectorAll('[name]')].map(one => [one.name, one.value])"))


def config(draw):
    """The values of a config.json, some of them left out."""
    heads = draw.choice([8, 12, 20])
    kind, size = draw.choice(TYPES), heads * draw.choice([64, 96])
    values = {"model_type": kind, "vocab_size": draw.randint(9000, 60000)}
    if kind == "gpt2":
        values |= {"n_layer": draw.randint(1, 40), "n_head": heads, "n_embd": size}
        return values | draw.choice([{}, {"n_inner": 5000}, {"n_positions": 3000}])
    values |= {"num_hidden_layers": draw.randint(1, 40), "num_attention_heads": heads}
    values |= {"hidden_size": size, "intermediate_size": draw.randint(1000, 9000)}
    groups = draw.choice([heads // 4, heads])
    values |= {"num_key_value_heads": groups} if kind != "llama" or groups < heads else {}
    values |= draw.choice([{}, {"head_dim": 80}, {"max_position_embeddings": 3000}])
    return values | draw.choice([{}, {"tie_word_embeddings": True}, {"attention_bias": True},
                                 {"mlp_bias": True}, {"sliding_window": 2500}])  # fmt: skip


def drawn(number, named=True):
    draw = random.Random(5)
    return [
        {
            "serve": draw.choice(NAMES) if named else PASTED,
            "config": "" if named else json.dumps(config(draw)),
            "gpu": draw.choice([*GPUS, BY_SIZE]),
            "gib": draw.choice(["7.5", "24", "31"]),
            "weights": draw.choice(list(BYTES)),
            "batch_size": draw.choice([1, 2, 7, 32]),
            "prompt": draw.randint(1, 3000),
            "new_tokens": draw.choice([1, 2, 64, 900]),
            "all_logits": draw.random() < 0.3,
        }
        for _ in range(number)
    ]


def serving_of(one):
    """What settings mean, and the card. Raises ValueError as `Serving` does."""
    pasted, by_size = one["serve"] == PASTED, one["gpu"] == BY_SIZE
    model = models.config(json.loads(one["config"])) if pasted else one["serve"]
    gpu = int(float(one["gib"]) * 2**30) if by_size else one["gpu"]
    return Serving(model, **{name: one[name] for name in FIELDS}), find_gpu(gpu)


def answers(page, asked):
    """What the page says of a list of settings: (bytes by name, verdict), or a refusal's words."""
    return page.run(f"""{json.dumps(asked)}.map(one => {{
        try {{ const {{ found, verdict }} = panel.calculator.judged(one);
               return [found, verdict]; }}
        catch (error) {{ return error.message; }}
    }})""")


@pytest.mark.parametrize("named", [True, False])
def test_it_refuses_what_python_refuses(page, named):
    asked = drawn(100, named)
    for one, found in zip(asked, answers(page, asked), strict=True):
        try:
            serving, card = serving_of(one)
            window = getattr(models.config(serving.model), "sliding_window", None)
            ends = window and serving.prompt + serving.new_tokens > window
            lacks = serving.compute_dtype == "bf16" and "bfloat16" not in card.native_dtypes
            refused = ends or lacks
        except ValueError:
            refused = True
        assert isinstance(found, str) == bool(refused), (one, found)
        assert not refused or "together" in found or "no native bfloat16" in found


CASES = [
    ("gpt2", "fp32", "T4", 1, 900, 60, False),
    ("gpt2-large", "nf4", "A100-80GB", 16, 500, 5, True),
    ("llama-3.2-1b", "fp16", "H100", 3, 900, 60, False),
    ("llama-3-8b", "int8", "A100-80GB", 16, 500, 1, False),
    ("llama-3.1-8b", "nf4", "T4", 1, 900, 5, False),  # scores of all pairs
    ("llama-2-7b", "nf4", "H100", 1, 128, 5, False),  # an unpacked weight
    ("qwen2.5-0.5b", "fp32", "T4", 1, 500, 40, True),
    ("mistral-7b", "bf16", "A100-80GB", 16, 900, 60, False),
    ("llama-3.2-3b", "fp16", "T4", 200, 40, 90, False),  # copies of the cache for a token
    ("qwen2.5-0.5b", "fp32", "V100", 200, 40, 90, False),
]


def setting(model, *values):
    names = "weights", "gpu", "batch_size", "prompt", "new_tokens", "all_logits"
    return {"serve": model, "config": "", "gib": "24", **dict(zip(names, values, strict=True))}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_the_page_says_what_is_simulated(page, case):
    ((form, _),) = answers(page, [setting(*case)])
    serving, card = serving_of(setting(*case))
    run = simulate(serving, card.without_limit())
    held = getattr(run, form["phase"])
    assert form["weights"] == pytest.approx(held["weights"], rel=1e-4)
    # GPT-2's many small layers are rounded up to the allocator's blocks.
    within = 0.035 if case[0].startswith("gpt2") else 0.012
    assert sum(form[name] for name in HELD) == pytest.approx(run.peak_allocated, rel=within)
    for name in ("kv_cache", "activations", "logits"):
        assert form[name] == pytest.approx(held[name], abs=0.01 * run.peak_allocated)


# What random borders found that said fits and did not, and why.
BORDERS = {
    "copies of the cache for all heads": ("qwen2.5-0.5b", "int8", "V100", 1063, 52, 500, False),
    "and in half precision": ("llama-3.2-3b", "fp16", "T4", 58, 284, 500, True),
    "blocks of another moment": ("qwen2.5-1.5b", "fp32", "L40S", 10, 5252, 500, True),
    "ends of segments": ("mistral-7b", "fp16", "T4", 2, 137, 2, False),
}


@pytest.mark.parametrize("why", BORDERS)
def test_what_an_allocator_keeps_is_not_said_to_fit(page, why):
    ((_, verdict),) = answers(page, [setting(*BORDERS[why])])
    assert verdict != "fits" and not fits(*serving_of(setting(*BORDERS[why])))


@pytest.mark.parametrize(("texts", "said"), [(30, "fits"), (70, "does not fit")])
def test_what_it_says_of_a_card_is_so(page, texts, said):
    asked = setting("llama-3-8b", "fp16", "A100-80GB", texts, 4096, 64, False)
    ((_, verdict),) = answers(page, [asked])
    assert verdict == said and fits(*serving_of(asked)).fits == (said == "fits")


@pytest.mark.parametrize("gpu", ["T4", "L4"])
@pytest.mark.parametrize("weights", ["fp16", "fp32"])
def test_it_says_what_is_simulated(page, gpu, weights):
    """The page is not only Python's twin: of cards with flash attention and without."""
    values = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 1024}
    values |= {"intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    values |= {"vocab_size": 32000, "max_position_embeddings": 4096}
    asked = {"weights": weights, "batch_size": 4, "prompt": 900, "new_tokens": 20}
    asked |= {"all_logits": False}
    setting = {"serve": PASTED, "config": json.dumps(values), "gpu": gpu, "gib": "24"} | asked
    found = page.run(f"panel.calculator.judged({json.dumps(setting)}).found")
    run = simulate(Serving(models.config(values), **asked), find_gpu(gpu).without_limit())
    held = getattr(run, found["phase"])
    assert sum(found[name] for name in HELD) == pytest.approx(run.peak_allocated, rel=0.025)
    for name in ("weights", "kv_cache", "activations"):
        assert found[name] == pytest.approx(held[name], abs=0.01 * run.peak_allocated)


@pytest.mark.parametrize("field", ["batch_size", "prompt"])
def test_the_largest_fits_and_the_next_does_not(page, field):
    one = {"serve": "llama-3.1-8b", "gpu": "L4", "weights": "fp16"}
    one |= {"batch_size": 2, "prompt": 700, "new_tokens": 64, "all_logits": False}
    most = page.run(f"panel.calculator.largest({json.dumps(one)}, '{field}')")
    one |= {"config": "", "gib": "24"}
    said = [verdict for _, verdict in answers(page, [one | {field: n} for n in (most, most + 1)])]
    assert said[0] == "fits" != said[1] and fits(*serving_of(one | {field: most}))


@pytest.mark.slow
def test_the_largest_batch_that_it_says_fits_does_so(page):
    """Random borders, half of them of cards without flash attention."""
    asked = [one | {"gpu": gpu} for one in drawn(30) for gpu in ("T4", "L4")]
    largest = page.run(f"""{json.dumps(asked)}.map(one => {{
        try {{ return panel.calculator.largest(one, "batch_size"); }}
        catch (error) {{ return 0; }}
    }})""")
    borders = [one | {"batch_size": n} for one, n in zip(asked, largest, strict=True) if n]
    untrue = [one for one in borders if not fits(*serving_of(one))]
    assert len(borders) >= 20 and not untrue, untrue


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2.5-1.5b", "mistral-7b", "gpt2-xl"])
def test_a_pasted_config_is_the_named_model(page, name):
    page.set("serve", name)
    said, shown = page.text(".say"), page.figures()
    page.set("config", models.config(name).to_json_string(use_diff=False))
    page.set("serve", PASTED)
    assert (page.text(".say"), page.figures()) == (said, shown)
    assert "--config config.json" in page.text(".line")
    page.set("serve", name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Paste the config.json of a model"),
        ("{", "config.json: this is not a readable JSON file"),
        ("[]", "model_type is undefined: known are gpt2, llama, mistral, qwen2"),
        ('{"model_type": "t5"}', 'model_type is "t5": known are gpt2, llama, mistral, qwen2'),
        ('{"model_type": "llama", "hidden_size": -1}', "hidden_size is -1: allowed are whole"),
    ],
)
def test_what_is_no_config_of_this_form_is_refused(page, text, words):
    page.set("config", text)
    page.set("serve", PASTED)
    assert words in page.text(".say") and page.run("panel.querySelector('.answer').hidden")
    page.set("serve", "llama-3.1-8b")
    assert not page.run("panel.querySelector('.answer').hidden")
    assert page.run("panel.querySelector('[name=config]').closest('label').hidden")


def test_a_card_can_be_given_by_its_gib(page):
    page.set("gpu", BY_SIZE)
    page.set("gib", "11.5")
    assert "the card of 11.5 GiB." in page.text(".say")
    words = shlex.split(page.text(".line"))
    assert cli.parser().parse_args(words[1:]).gpu == int(11.5 * 2**30)
    page.set("gib", "-1")
    assert "gpu is -1 GiB: allowed are numbers above 0" in page.text(".say")
    page.set("gpu", "T4")
    assert "the T4" in page.text(".say")


def test_the_line_is_one_that_memlab_takes(page):
    page.set("weights", "int8")
    page.set("all_logits", "true")
    page.set("new_tokens", "9")
    words = shlex.split(page.text(".line"))
    options = cli.parser().parse_args(words[1:])
    said = settings(page)
    assert (options.model, options.gpu) == (said["serve"], said["gpu"])
    assert (options.weights, options.new_tokens, options.all_logits) == ("int8", 9, True)
    assert options.prompt == int(said["prompt"])


def test_a_link_keeps_the_settings_and_a_broken_one_is_told(page):
    go = "location.hash = {}; new Promise(done => setTimeout(done, 50))"
    page.set("serve", "gpt2-xl")
    page.set("prompt", "321")
    said, shown = settings(page), page.figures()
    link = page.run("panel.querySelector('.links a').getAttribute('href')")
    page.set("serve", "llama-2-7b")
    assert page.figures() != shown
    page.tab.run(go.format(json.dumps(link)))
    assert settings(page) == said and page.figures() == shown
    page.set("serve", PASTED)
    page.set("config", json.dumps({"model_type": "gpt2", "n_layer": 3}))
    page.set("gpu", BY_SIZE)
    page.set("gib", "3.5")
    said, shown = settings(page), page.figures()
    link = page.run("panel.querySelector('.links a').getAttribute('href')")
    page.set("gpu", "T4")
    page.set("serve", "llama-2-7b")
    plain = page.run("panel.querySelector('.links a').getAttribute('href')")
    assert "config" not in plain and "gib" not in plain
    page.tab.run(go.format(json.dumps(link)))
    assert settings(page) == said and page.figures() == shown
    page.tab.run(go.format("'#serve=gpt-7'"))
    assert "model is gpt-7: allowed are gpt2" in page.text(".say")
    page.tab.run(go.format("'#serve=gpt2&speed=9'"))
    assert "there is no switch speed" in page.text(".say")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("prompt", "0", "prompt, tokens is 0: allowed are whole numbers from 1"),
        ("batch_size", "", "texts at a time is empty"),
        ("new_tokens", "999999", "allows up to"),
        ("weights", "bf16", "T4 has no native bfloat16"),
    ],
)
def test_what_it_refuses_it_names(page, name, value, words):
    page.tab.run("location.hash = '#serve=llama-3.1-8b&gpu=T4&weights=nf4&prompt=100&new_tokens=5';"
                 "new Promise(done => setTimeout(done, 50))")  # fmt: skip
    before = settings(page)[name]
    page.set(name, value)
    assert words in page.text(".say")
    assert page.run("panel.querySelector('.answer').hidden")
    page.set(name, before)
    assert page.text(".say").startswith("Fits the T4")


def test_by_touch(page):
    """A tap on the link to the settings writes them into the address."""
    page.tab.run("location.hash = ''")
    place = page.run("""(() => {
        const one = panel.querySelector('.links a');
        one.scrollIntoView({ block: 'center' });
        const box = one.getBoundingClientRect();
        return { x: box.x + box.width / 2, y: box.y + box.height / 2 };
    })()""")
    page.tab.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[place])
    page.tab.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.run("new Promise(done => setTimeout(done, 50))")
    assert page.tab.run("location.hash") == page.run("panel.querySelector('.links a').hash")


def test_by_keyboard(page):
    page.run("panel.querySelector('[name=gpu]').focus()")
    before = settings(page)["gpu"]
    for kind in ("keyDown", "keyUp"):
        page.tab.send("Input.dispatchKeyEvent", type=kind, key="ArrowDown", code="ArrowDown",
                      windowsVirtualKeyCode=40)  # fmt: skip
    assert settings(page)["gpu"] != before


@pytest.mark.parametrize(
    ("model", "gpu", "words"),
    [("gpt2-tiny", "T4", "model is 'gpt2-tiny'"), ("gpt2", "T5", "gpu is 'T5'")],
)
def test_bad_input_raises(model, gpu, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ServingCalculator(Serving(model), gpu)
