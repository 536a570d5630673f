"""Forward and backward as an animation that plays on a static page, drawn from the log."""

import html
import re

from memlab.book.panel import Panel
from memlab.footprint import Footprint

CURVE, GAP, LEFT, WIDTH = 64, 8, 16, 320  # lengths of the drawing
ROWS, LEAST, MOST = 200, 9, 26  # of all layers together, and of one layer's row


class Film(Panel):
    """What each layer holds at every moment of a step, for several ways to run the same layers.

    runs: title -> Footprint with its timeline. Drawn are activations and temporary tensors of
        modules with a number in their path, a row a number, as high as their bytes, and below the
        sum of all activations and temporaries. All runs are drawn to one scale.
    kind: given a Life and its Timeline, one of the names in `colours`.
    colours: name of a kind -> its colour.
    unit: bytes that count as one.
    word: what the unit is called, as "units".

    Without scripts, and before it plays, it is a picture of the whole step.

    Raises ValueError without runs, and for a run without a timeline or without numbered modules.
    """

    kind = "film"
    still = "Without scripts this is a still picture of the whole step."

    def __init__(
        self,
        runs: dict[str, Footprint],
        kind,
        colours: dict[str, str],
        unit: int,
        word: str = "units",
    ):
        if not runs:
            raise ValueError("runs is empty: allowed are one or more footprints with a timeline")
        self.colours, self.unit, self.word, self.kind_of = colours, unit, word, kind
        self.lines = {name: run.timeline for name, run in runs.items()}
        for name, line in self.lines.items():
            if line is None or not self._bars(line):
                lacks = "no timeline" if line is None else "no tensor of a numbered layer"
                raise ValueError(f"runs[{name!r}] has {lacks}: allowed are traced layers")
        self.length = max(len(line.phases) for line in self.lines.values())
        self.most = max(max(self.held(line)) for line in self.lines.values())
        drawn = [bar for line in self.lines.values() for bar in self._bars(line)]
        self.layers = max(layer for layer, *_ in drawn)
        self.row = min(MOST, max(LEAST, ROWS // self.layers))
        self.scale = (self.row - 1.5) / max(top + size for *_, top, size in drawn)  # of a unit

    def held(self, line) -> list[float]:
        """Units of activations and temporaries at each moment of a timeline."""
        levels = zip(line.levels["activations"], line.levels["temporary"], strict=True)
        return [(a + b) / self.unit for a, b in levels]

    def _bars(self, line) -> list[tuple[int, int, int, str, float, float]]:
        """(layer from 1, moments of birth and death, kind, units below, units) of what is drawn.

        A layer's tensors lie on each other, each as low as those that live with it leave room.
        """
        bars, rows = [], {}
        for life in sorted(line.lives, key=lambda life: life.born):
            number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", life.module)
            if number and life.category in ("activations", "temporary"):
                died = len(line.phases) if life.died is None else life.died
                layer, size, low = int(number[1]) + 1, life.nbytes / self.unit, 0.0
                row = [bar for bar in rows.get(layer, ()) if bar[2] > life.born]
                for *_, other, high in sorted(row, key=lambda bar: bar[4]):
                    if low + size > other:
                        low = max(low, other + high)
                bar = (layer, life.born, died, self.kind_of(life, line), low, size)
                rows[layer] = [*row, bar]
                bars.append(bar)
        return bars

    def _figure(self, name: str, line) -> str:
        bars, held, names = self._bars(line), self.held(line), list(self.colours)
        layers, most = max(bar[0] for bar in bars), max(held)
        scale = (WIDTH - LEFT) / self.length
        bottom = layers * self.row + GAP + CURVE
        drawn = [
            f'<rect x="{LEFT + born * scale:.2f}" '
            f'y="{(layers - layer + 1) * self.row - (low + size) * self.scale:.2f}" '
            f'width="{(died - born) * scale:.2f}" height="{max(0.4, size * self.scale):.2f}" '
            f'fill="{self.colours[kind]}" data-layer="{layer}" data-kind="{names.index(kind)}" '
            f'data-born="{born}" data-died="{died}" data-units="{size:g}"/>'
            for layer, born, died, kind, low, size in bars
        ]
        points = [f"{LEFT},{bottom}"]
        for i, units in enumerate(held):
            y = f"{bottom - CURVE * units / self.most:.2f}"
            points += [f"{LEFT + (i + j) * scale:.2f},{y}" for j in (0, 1)]
        points.append(f"{LEFT + len(held) * scale:.2f},{bottom}")
        turn = line.phases.index("backward") if "backward" in line.phases else len(line.phases)
        words = (
            f"{name}: {layers} layers, {len(held)} moments, backward from moment {turn}; at most "
            f"{most:.0f} {self.word} are held, at moment {held.index(most)}"
        )
        labels = "".join(
            f'<text x="{LEFT - 3}" y="{(layers - n + 0.5) * self.row + 3:g}">{n}</text>'
            for n in (1, layers)
        )
        edge = LEFT + turn * scale
        return (
            f'<figure data-held="{" ".join(f"{units:g}" for units in held)}" data-turn="{turn}">'
            f"<figcaption><b>{html.escape(name)}</b></figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {bottom + 2}" role="img" aria-label="{html.escape(words)}">'
            f"{labels}{''.join(drawn)}"
            f'<polygon class="held" points="{" ".join(points)}"/>'
            f'<line class="turn" x1="{edge:.2f}" x2="{edge:.2f}" y1="0" y2="{bottom}"/>'
            f'<line class="head" y1="0" y2="{bottom + 2}"/>'
            f"</svg><p>at most {most:.0f} {html.escape(self.word)}</p></figure>"
        )

    def always(self) -> str:
        figures = "\n".join(self._figure(name, line) for name, line in self.lines.items())
        kinds = "".join(
            f'<span><i style="background:{colour}"></i>{html.escape(kind)}</span>'
            for kind, colour in self.colours.items()
        )
        held = '<span><i style="background: var(--muted)"></i>held in all</span>'
        return f'<div class="panels">\n{figures}\n</div><div class="keys">{kinds}{held}</div>'

    def data(self) -> dict:
        scale = (WIDTH - LEFT) / self.length
        return {"length": self.length, "left": LEFT, "scale": scale, "word": self.word}

    def __repr__(self) -> str:
        return f"Film of {', '.join(self.lines)}"
