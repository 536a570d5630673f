"""What the panels of a page share: one look, one frame, one set of small helpers."""

import json
import re
from importlib import resources
from zlib import crc32

# A file of a panel: what is its own of style, page and script, in this order.
PARTS = re.compile(r"<style>\n(.*?)</style>\n(.*?)<script>\n(.*)</script>\n", re.DOTALL)

# What it says of a script that it shares with another panel.
SHARED = re.compile(r"/\* (\w+\.js) \*/")


def read(name: str) -> str:
    """The text of a file of the panels' assets."""
    return resources.files("memlab.panels.assets").joinpath(name).read_text(encoding="utf8")


class Panel:
    """A part of a page with its own script: no kernel, no network, no library.

    kind: its file in `assets`, without the ending, and its class in the page.
    data: what the script is given, of what JSON has.
    still: what stands there without scripts, as HTML.

    Its place in the page is found by the panel's content, and among equal ones by which has begun.
    So any number of panels can stand on a page, and what they write is always the same.
    """

    kind = ""
    still = "This panel needs scripts. It does nothing where they are off."

    def data(self) -> dict:
        return {}

    def _repr_html_(self) -> str:
        source = SHARED.sub(lambda match: read(match[1]), read(f"{self.kind}.html"))
        parts = PARTS.fullmatch(source)
        if parts is None:
            raise ValueError(f"{self.kind}.html is not a style, a body and a script")
        style, body, script = parts.groups()
        # Stronger than what all panels share, which the next panel of a page says again.
        style = style.replace(f".memlab-{self.kind}", f".memlab-panel.memlab-{self.kind}")
        data = json.dumps(self.data()).replace("<", "\\u003c")  # no tag can begin in the script
        key = crc32((style + body + script + data).encode())
        pieces = {
            "STYLE": style.rstrip(),
            "KIND": self.kind,
            "KEY": f"{self.kind}-{key:08x}",
            "STILL": self.still,
            "BODY": body.rstrip(),
            "DATA": data,
            "SCRIPT": script.rstrip(),
        }
        return re.sub(r"\{\{(\w+)\}\}", lambda match: pieces[match[1]], read("panel.html"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}, to be seen where HTML is shown"
