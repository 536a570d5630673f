"""The calculator of inference says in a browser what the form says in Python."""

import json
import random
import re
import shlex

import pytest
from panel_page import PanelPage

from memlab import cli
from memlab.book.serving_calculator import FIELDS, HELD, NAMES, ServingCalculator
from memlab.gpus import GPUS
from memlab.serving import Serving
from memlab.serving_form import BYTES, judged, serving_formula


@pytest.fixture(scope="module")
def page(chromium, tmp_path_factory):
    page = PanelPage(chromium, tmp_path_factory.mktemp("serving"), ServingCalculator())
    yield page
    page.close()


def settings(page):
    return dict(page.run("[...panel.querySelectorAll('[name]')].map(one => [one.name, one.value])"))


def drawn(number):
    draw = random.Random(5)
    return [
        {
            "serve": draw.choice(NAMES),
            "gpu": draw.choice(list(GPUS)),
            "weights": draw.choice(list(BYTES)),
            "batch_size": draw.choice([1, 2, 7, 32]),
            "prompt": draw.randint(1, 3000),
            "new_tokens": draw.choice([1, 2, 64, 900]),
            "all_logits": draw.random() < 0.3,
        }
        for _ in range(number)
    ]


def in_python(one):
    """(bytes by name, verdict) of a setting, or the words of the refusal."""
    try:
        serving = Serving(one["serve"], **{name: one[name] for name in FIELDS})
        return serving_formula(serving, one["gpu"]), judged(serving, one["gpu"])
    except ValueError as error:
        return str(error)


def test_it_says_what_python_says_of_200_settings(page):
    asked = drawn(200)
    answers = page.run(f"""{json.dumps(asked)}.map(one => {{
        try {{ const {{ found, verdict }} = panel.calculator.judged(one);
               return [found, verdict]; }}
        catch (error) {{ return error.message; }}
    }})""")
    verdicts = set()
    for one, found in zip(asked, answers, strict=True):
        wanted = in_python(one)
        if isinstance(wanted, str):
            assert isinstance(found, str), one
            assert "together" in found or "no native bfloat16" in found
            continue
        assert {name: found[0][name] for name in (*HELD, "phase")} == wanted[0], one
        assert found[1] == wanted[1]
        verdicts.add(found[1])
    assert verdicts >= {"fits", "does not fit"}
    assert sum(not isinstance(found, str) for found in answers) > 100


@pytest.mark.parametrize("field", ["batch_size", "prompt"])
def test_the_largest_fits_and_the_next_does_not(page, field):
    one = {"serve": "llama-3.1-8b", "gpu": "L4", "weights": "fp16"}
    one |= {"batch_size": 2, "prompt": 700, "new_tokens": 64, "all_logits": False}
    most = page.run(f"panel.calculator.largest({json.dumps(one)}, '{field}')")
    assert in_python(one | {field: most})[1] == "fits" != in_python(one | {field: most + 1})[1]


def test_the_line_is_one_that_memlab_takes(page):
    page.set("weights", "int8")
    page.set("all_logits", "true")
    page.set("new_tokens", "9")
    words = shlex.split(page.text(".line"))
    options = cli._parser().parse_args(words[1:])
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
