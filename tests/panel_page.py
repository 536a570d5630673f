"""Panels on a page of a real browser, driven as a reader does: fields, buttons, what is shown."""

import json

HEAD = "<!doctype html><html{}><meta charset=utf-8><meta name=viewport content=width=device-width>"


class PanelPage:
    """A tab with panels; `at` says which of them is meant, in the order of the page."""

    def __init__(self, chromium, folder, *panels, width=390, root="", body=""):
        file = folder / "panels.html"
        content = "\n".join(panel._repr_html_() for panel in panels)
        file.write_text(f"{HEAD.format(root)}<body{body}>{content}", encoding="utf8")
        self.tab, self.at = chromium.open(file.as_uri(), width=width), 0

    def run(self, script):
        """The value of an expression, in which `panel` is the panel's element."""
        return self.tab.run(
            f"((panel) => ({script}))(document.querySelectorAll('.memlab-panel')[{self.at}])"
        )

    def set(self, name, value):
        """Give a field a value, as a reader who types, drags or chooses."""
        self.run(f"""(() => {{
            const field = panel.querySelector('[name="{name}"]');
            if (field.type === 'checkbox') field.checked = {json.dumps(value)};
            else field.value = {json.dumps(value)};
            field.dispatchEvent(new Event('input', {{ bubbles: true }}));
            field.dispatchEvent(new Event('change', {{ bubbles: true }}));
        }})()""")

    def click(self, selector, nth=0):
        self.run(f"panel.querySelectorAll({json.dumps(selector)})[{nth}].click()")

    def text(self, selector):
        return self.run(f"panel.querySelector({json.dumps(selector)}).textContent")

    def moment(self, after=0):
        """Where a panel that plays stands, after so many milliseconds."""
        at = "Number(panel.querySelector('[name=moment]').value)"
        return self.run(f"new Promise(done => setTimeout(() => done({at}), {after}))")

    def figures(self):
        """The panel's figures by name, as numbers."""
        each = "[...panel.querySelectorAll('[data-figure]')]"
        return dict(self.run(f"{each}.map(f => [f.dataset.figure, Number(f.dataset.value)])"))

    def close(self):
        assert self.tab.complaints == []
        assert all(request.startswith("file:") for request in self.tab.requests)
        self.tab.close()
