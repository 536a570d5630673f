"""Panels on a page of a real browser, driven as a reader does: fields, buttons, what is shown."""

import json

HEAD = "<!doctype html><html><meta charset=utf-8><meta name=viewport content=width=device-width>"


class PanelPage:
    """A tab with panels; `at` says which of them is meant, in the order of the page."""

    def __init__(self, chromium, folder, *panels, width=390, body="", kind=".memlab-panel"):
        file, self.kind = folder / "panels.html", kind
        content = "\n".join(panel._repr_html_() for panel in panels)
        file.write_text(f"{HEAD}<body{body}>{content}", encoding="utf8")
        self.tab, self.at = chromium.open(file.as_uri(), width=width), 0

    def run(self, script):
        """The value of an expression, in which `panel` is the panel's element."""
        panels = f"document.querySelectorAll({json.dumps(self.kind)})"
        return self.tab.run(f"((panel) => ({script}))({panels}[{self.at}])")

    def set(self, name, value):
        """Give a field a value, as a reader who types, drags or chooses. name: or a class."""
        selector = name if name.startswith(".") else f'[name="{name}"]'
        self.run(f"""(() => {{
            const field = panel.querySelector({json.dumps(selector)});
            if (field.type === 'checkbox') field.checked = {json.dumps(value)};
            else field.value = {json.dumps(value)};
            field.dispatchEvent(new Event('input', {{ bubbles: true }}));
            field.dispatchEvent(new Event('change', {{ bubbles: true }}));
        }})()""")

    def put(self, **values):
        for name, value in values.items():
            self.set(name, str(value))

    def settings(self):
        fields = "[...panel.querySelectorAll('[name]')]"
        return self.run(f"Object.fromEntries({fields}.map(field => [field.name, field.value]))")

    def click(self, selector, nth=0):
        self.run(f"panel.querySelectorAll({json.dumps(selector)})[{nth}].click()")

    def press(self, key, code=None, **more):
        for kind in ("keyDown", "keyUp"):
            how = more if kind == "keyDown" else {}
            self.tab.send("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, **how)

    def text(self, selector):
        return self.run(f"panel.querySelector({json.dumps(selector)}).textContent")

    def said(self):
        return self.text(".say")

    def link(self):
        """The address that keeps the settings."""
        return self.run("panel.querySelector('.links a').getAttribute('href')")

    def follow(self, link):
        self.tab.run(f"location.hash = {json.dumps(link)}")
        self.after(50, "0")

    def after(self, milliseconds, expression):
        later = f"setTimeout(() => done({expression}), {milliseconds})"
        return self.run(f"new Promise(done => {later})")

    def moment(self, after=0):
        """The moment that a panel shows which plays, after so many milliseconds."""
        return self.after(after, "Number(panel.querySelector('[name=moment]').value)")

    def figures(self):
        """The panel's figures by name, as numbers."""
        each = "[...panel.querySelectorAll('[data-figure]')]"
        return dict(self.run(f"{each}.map(f => [f.dataset.figure, Number(f.dataset.value)])"))

    def close(self):
        assert self.tab.complaints == []
        assert all(request.startswith("file:") for request in self.tab.requests)
        self.tab.close()
