"""Forward and backward as an animation that plays on a static page, drawn from the log."""

import html
import re
from importlib import resources
from zlib import crc32

from memlab.footprint import Footprint

ROW, CURVE, GAP, LEFT, WIDTH = 11, 44, 6, 16, 320  # lengths of the drawing; a row is a layer's


class Film:
    """What each layer holds at every moment of a step, for several ways to run the same layers.

    runs: title -> Footprint with its timeline. Drawn are activations and temporary tensors of
        modules with a number in their path, a row a number, and below the sum of all activations
        and temporaries.
    kind: given a Life and its Timeline, one of the names in `colours`.
    colours: name of a kind -> its colour.
    unit: bytes that count as one.

    In a notebook and on a static page it shows itself and needs neither a kernel nor a network.
    Without scripts, and before it plays, it is a picture of the whole step.

    Raises ValueError without runs, and for a run without a timeline or without numbered modules.
    """

    def __init__(self, runs: dict[str, Footprint], kind, colours: dict[str, str], unit: int):
        if not runs:
            raise ValueError("runs is empty: allowed are one or more footprints with a timeline")
        self.colours, self.unit, self.kind = colours, unit, kind
        self.lines = {name: run.timeline for name, run in runs.items()}
        for name, line in self.lines.items():
            if line is None or not self._bars(line):
                lacks = "no timeline" if line is None else "no tensor of a numbered layer"
                raise ValueError(f"runs[{name!r}] has {lacks}: allowed are traced layers")
        self.length = max(len(line.phases) for line in self.lines.values())
        self.most = max(max(self.held(line)) for line in self.lines.values())

    def held(self, line) -> list[float]:
        """Units of activations and temporaries at each moment of a timeline."""
        levels = zip(line.levels["activations"], line.levels["temporary"], strict=True)
        return [(a + b) / self.unit for a, b in levels]

    def _bars(self, line) -> list[tuple[int, int, int, str]]:
        """(layer from 1, moment of birth, moment of death, kind) of each tensor that is drawn."""
        bars = []
        for life in line.lives:
            number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", life.module)
            if number and life.category in ("activations", "temporary"):
                died = len(line.phases) if life.died is None else life.died
                bars.append((int(number[1]) + 1, life.born, died, self.kind(life, line)))
        return bars

    def _panel(self, name: str, line) -> str:
        bars, held, names = self._bars(line), self.held(line), list(self.colours)
        layers, most = max(bar[0] for bar in bars), max(held)
        scale = (WIDTH - LEFT) / self.length
        bottom = layers * ROW + GAP + CURVE
        drawn = [
            f'<rect x="{LEFT + born * scale:.2f}" y="{(layers - layer) * ROW + 1}" '
            f'width="{(died - born) * scale:.2f}" height="{ROW - 2}" '
            f'fill="{self.colours[kind]}" data-layer="{layer}" data-kind="{names.index(kind)}" '
            f'data-born="{born}" data-died="{died}"/>'
            for layer, born, died, kind in bars
        ]
        points = [f"{LEFT},{bottom}"]
        for i, units in enumerate(held):
            y = f"{bottom - CURVE * units / self.most:.2f}"
            points += [f"{LEFT + (i + j) * scale:.2f},{y}" for j in (0, 1)]
        points.append(f"{LEFT + len(held) * scale:.2f},{bottom}")
        turn = line.phases.index("backward") if "backward" in line.phases else len(line.phases)
        words = (
            f"{name}: {layers} layers, {len(held)} moments, backward from moment {turn}; at most "
            f"{most:.0f} units are held, at moment {held.index(most)}"
        )
        labels = "".join(
            f'<text x="{LEFT - 3}" y="{(layers - n) * ROW + 9}">{n}</text>' for n in (1, layers)
        )
        return (
            f'<figure data-held="{" ".join(f"{units:g}" for units in held)}" data-turn="{turn}">'
            f"<figcaption><b>{html.escape(name)}</b><span></span></figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {bottom + 2}" role="img" aria-label="{html.escape(words)}">'
            f"{labels}{''.join(drawn)}"
            f'<polygon class="held" points="{" ".join(points)}"/>'
            f'<line class="turn" x1="{LEFT + turn * scale:.2f}" x2="{LEFT + turn * scale:.2f}" '
            f'y1="0" y2="{bottom}"/><line class="head" y1="0" y2="{bottom + 2}"/>'
            f"</svg><p>at most {most:.0f} units</p></figure>"
        )

    def _repr_html_(self) -> str:
        page = resources.files("memlab.data").joinpath("film.html").read_text(encoding="utf8")
        panels = "\n".join(self._panel(name, line) for name, line in self.lines.items())
        kinds = "".join(
            f'<span><i style="background:{colour}"></i>{html.escape(kind)}</span>'
            for kind, colour in self.colours.items()
        )
        pieces = {
            "NAME": f"memlab-film-{crc32(panels.encode()):08x}",
            "PANELS": panels,
            "KINDS": kinds,
            "LENGTH": str(self.length),
            "LEFT": str(LEFT),
            "SCALE": f"{(WIDTH - LEFT) / self.length:.6f}",
        }
        return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], page)

    def __repr__(self) -> str:
        return f"Film of {', '.join(self.lines)}"
