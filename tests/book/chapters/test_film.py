"""The film shows what the log says, in a real browser, without a network, and without scripts."""

import re
from dataclasses import replace

import pytest
import torch

from memlab import SimulatedGPU
from memlab.book import show
from memlab.book.chapters.film import Film

UNIT = 64 * 32 * 4
COLOURS = {"forward": show.COLOURS["activations"], "backward": show.COLOURS["gradients"]}


def kind(life, line):
    return line.phases[life.born]


@pytest.fixture(scope="module")
def runs():
    found = {}
    for layers in (2, 4):
        with SimulatedGPU() as gpu:
            steps = [(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(layers)]
            chain = torch.nn.Sequential(*(torch.nn.Sequential(*step) for step in steps)).cuda()
            gpu.watch(chain)
            x = torch.randn(64, 32, device="cuda", requires_grad=True)
            gpu.reset_peak()
            chain(x).sum().backward()
        found[f"{layers} <layers>"] = gpu.footprint
    return found


@pytest.fixture
def page(open_panel, runs):
    return open_panel(Film(runs, kind, COLOURS, UNIT))


def go_to(tab, moment):
    tab.run(f"""(() => {{
        const slider = document.querySelector('.memlab-film input');
        slider.value = {moment};
        slider.dispatchEvent(new Event('input'));
    }})()""")


def strong(tab, film):
    bars = f"[...document.querySelectorAll('.memlab-film figure')[{film}].querySelectorAll('rect')]"
    return tab.run(f"{bars}.filter(bar => bar.style.opacity === '1').length")


def test_at_each_moment_the_bars_of_what_is_alive_are_strong(page, runs):
    for moment in (3, 9, 14):
        go_to(page, moment)
        for number, run in enumerate(runs.values()):
            line = run.timeline
            alive = [
                life
                for life in line.alive(moment)
                if life.module[:1].isdigit() and life.category in ("activations", "temporary")
            ]
            assert strong(page, number) == len(alive) > 0
            units = (line.levels["activations"][moment] + line.levels["temporary"][moment]) / UNIT
            said = page.run(
                f"document.querySelectorAll('.memlab-film figure p')[{number}].textContent"
            )
            assert f" {units:.0f} of at most" in said and line.phases[moment] in said
    assert page.run("document.documentElement.scrollWidth") <= 390


def test_it_plays_to_the_end_of_the_longest_and_shows_the_whole_again(page, runs):
    longest = max(len(run.timeline.phases) for run in runs.values())
    page.run("document.querySelector('.memlab-film .play').click()")
    at = "Number(document.querySelector('.memlab-film input').value)"
    moved = page.run(f"new Promise(done => setTimeout(() => done({at}), 1500))")
    assert 0 < moved < longest
    go_to(page, longest)
    assert strong(page, 1) == page.run(
        "document.querySelectorAll('.memlab-film figure')[1].querySelectorAll('rect').length"
    )


def test_who_wants_less_motion_gets_steps_instead_of_play(page):
    less = {"name": "prefers-reduced-motion", "value": "reduce"}
    page.send("Emulation.setEmulatedMedia", features=[less])
    shown = "getComputedStyle(document.querySelector('.memlab-film .play')).display"
    assert page.run(shown) == "none"
    page.run("document.querySelector('.memlab-film .forth').click()")
    assert page.run("Number(document.querySelector('.memlab-film input').value)") == 0


def test_without_scripts_it_is_a_described_picture(runs):
    page = Film(runs, kind, COLOURS, UNIT)._repr_html_()
    still = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    assert "a still picture" in still
    for run in runs.values():
        levels = run.timeline.levels
        most = max(map(sum, zip(levels["activations"], levels["temporary"], strict=True)))
        assert f"at most {most / UNIT:.0f} units are held" in still
    assert still.count("<rect") > 10 and "opacity" not in still
    assert "&lt;layers&gt;" in still and "<layers>" not in still


def test_bad_input_raises(runs):
    with pytest.raises(ValueError, match="runs is empty"):
        Film({}, kind, COLOURS, UNIT)
    run = next(iter(runs.values()))
    with pytest.raises(ValueError, match="'a'.*no timeline"):
        Film({"a": replace(run, timeline=None)}, kind, COLOURS, UNIT)
    bare = replace(run.timeline, lives=[])
    with pytest.raises(ValueError, match="no tensor of a numbered layer"):
        Film({"a": replace(run, timeline=bare)}, kind, COLOURS, UNIT)


def test_heights_are_bytes_to_one_scale_and_tensors_of_a_layer_do_not_overlap(page, runs):
    bars = page.run("""[...document.querySelectorAll('.memlab-film figure')].map(figure =>
        [...figure.querySelectorAll('rect')].map(bar => [bar.dataset.layer, +bar.dataset.born,
            +bar.dataset.died, +bar.getAttribute('y'), +bar.getAttribute('height'),
            +bar.dataset.units]))""")
    scales = {round(bar[4] / bar[5], 1) for film in bars for bar in film if bar[5] >= 1}
    assert len(scales) == 1
    for film, run in zip(bars, runs.values(), strict=True):
        numbered = [life for life in run.timeline.lives if life.module[:1].isdigit()]
        drawn = [life for life in numbered if life.category in ("activations", "temporary")]
        assert sum(bar[5] for bar in film) == pytest.approx(sum(x.nbytes for x in drawn) / UNIT)
        for i, (layer, born, died, y, height, _) in enumerate(film):
            for other, began, ended, top, high, _ in film[i + 1 :]:
                if layer == other and born < ended and began < died:
                    assert y + height <= top + 0.02 or top + high <= y + 0.02
