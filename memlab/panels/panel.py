"""The base class of all panels: one frame, one style and one set of JavaScript helpers."""

import json
import re
from importlib import resources
from zlib import crc32

# The file of a panel: its own style, body and script, in this order.
PARTS = re.compile(r"<style>\n(.*?)</style>\n(.*?)<script>\n(.*)</script>\n", re.DOTALL)

# A comment in a panel's script, which is replaced by the shared script that it names.
SHARED = re.compile(r"/\* (\w+\.js) \*/")


def read(name: str) -> str:
    """The text of a file in the folder `assets`."""
    return resources.files("memlab.panels.assets").joinpath(name).read_text(encoding="utf8")


class Panel:
    """A part of a page with its own script, which needs no kernel, network or library.

    kind: the name of its file in `assets`, without the suffix; also its CSS class.
    data: the values that the script gets, as plain JSON.
    still: the HTML that is shown if scripts are off.

    The script finds its element in the page by a checksum of the panel's content; among equal
    panels it takes the first that has not started. So a page may hold any number of panels, and the
    HTML of a panel is the same in every build.
    """

    kind = ""
    still = "This panel needs scripts. It does nothing if they are off."

    def data(self) -> dict:
        return {}

    def _repr_html_(self) -> str:
        source = SHARED.sub(lambda match: read(match[1]), read(f"{self.kind}.html"))
        parts = PARTS.fullmatch(source)
        if parts is None:
            raise ValueError(f"{self.kind}.html is not a style, a body and a script")
        style, body, script = parts.groups()
        # Each panel repeats the shared style. A more specific selector keeps a panel's own rules
        # above the shared rules of the panels that follow it on the page.
        style = style.replace(f".memlab-{self.kind}", f".memlab-panel.memlab-{self.kind}")
        data = json.dumps(self.data()).replace("<", "\\u003c")  # no "</script>" can occur in it
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
