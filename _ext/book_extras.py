"""Sphinx extension: this book's additions to Jupyter Book 1.

It adds the calculators, a launch button for Kaggle, vendored scripts and reading times. It checks
links and figures of the rendered pages. A failed check is a Sphinx warning, and the build treats
warnings as errors.
"""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from bs4 import BeautifulSoup
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.util import logging

ROOT = Path(__file__).resolve().parent.parent
logger = logging.getLogger(__name__)


def add_vendored_scripts(app, config):
    # Jupyter Book loads each script in the static folders of _config.yml on every page. It has
    # looked at them by now, so a folder that is added here is only copied.
    config.html_static_path.append(str(ROOT / "vendor"))


# The branch with the executed chapters, which `make publish-executed` pushes.
EXECUTED = "executed"


def add_launch_buttons(app, pagename, templatename, context, doctree):
    """Add a Kaggle button, and let Colab's open the executed chapter as Kaggle's does."""
    if doctree is None or Path(app.env.doc2path(pagename)).suffix != ".ipynb":
        return
    theme = app.config.html_theme_options
    folder = theme.get("path_to_docs", "").strip("/")
    path = f"{folder}/{pagename}.ipynb".lstrip("/")
    source = f"{theme['repository_url'].rstrip('/')}/blob/{EXECUTED}/{path}"
    button = {
        "type": "link",
        "text": "Kaggle",
        "tooltip": "Launch on Kaggle",
        "icon": "fa-brands fa-kaggle",
        "url": "https://kaggle.com/kernels/welcome?src=" + quote(source, safe=""),
    }
    # The theme links Colab's button to the stored notebook, which has no outputs.
    stored = f"/blob/{theme['repository_branch']}/"
    for group in context.get("header_buttons", []):
        if group.get("label") == "launch-buttons":
            for one in group["buttons"]:
                one["url"] = one["url"].replace(stored, f"/blob/{EXECUTED}/")
            group["buttons"].append(button)


def drop_doubled_scripts(app, pagename, templatename, context, doctree):
    # sphinx-thebe 0.3.1 declares the same `const` twice, an error in the console of every page.
    seen, kept = set(), []
    for script in context.get("script_files", []):
        body = getattr(script, "attributes", {}).get("body")
        if body is None or body not in seen:
            kept.append(script)
        seen.add(body)
    context["script_files"] = kept


class CalculatorOnPage(Directive):
    """The directive `{calculator}`: the training calculator, or with `serve` that of inference."""

    optional_arguments = 1

    def run(self):
        # Imported here because they import torch and transformers, which other pages do not need.
        from memlab.panels.calculator import Calculator
        from memlab.panels.serving_calculator import ServingCalculator

        panel = ServingCalculator() if self.arguments == ["serve"] else Calculator()
        return [nodes.raw("", panel._repr_html_(), format="html")]


class Links(HTMLParser):
    """The anchors of an HTML page (ids) and the links on it (hrefs)."""

    def __init__(self, page):
        super().__init__()
        self.ids, self.hrefs = {""}, []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.update(attributes[key] for key in ("id", "name") if attributes.get(key))
        if tag == "a" and "href" in attributes:
            self.hrefs.append(attributes["href"] or "")


def dead_links(folder):
    """(page, link) of each link inside a rendered book whose target does not exist."""
    folder = Path(folder).resolve()
    pages = {page: Links(page) for page in sorted(folder.rglob("*.html"))}
    dead = []
    for page, links in pages.items():
        if "_static" in page.parts:  # templates of the theme
            continue
        for href in dict.fromkeys(links.hrefs):
            target = urlsplit(href)
            if target.scheme or target.netloc:
                continue
            path = (page.parent / unquote(target.path)).resolve() if target.path else page
            found = path.is_file() and path.is_relative_to(folder)
            if found and path in pages:
                found = unquote(target.fragment) in pages[path].ids
            if not found:
                dead.append((page.relative_to(folder).as_posix(), href))
    return dead


def count_words(text):
    return len(re.findall(r"\w[\w.,'%-]*", text))


def reading_minutes(page):
    """Reading time of a rendered page in minutes; folded content does not count.

    page: the HTML as text. The pace is a learner's: 170 words per minute of prose, 100 of code and
    250 of printed output. A table, a picture or a control adds half a minute.
    """
    article = BeautifulSoup(page, "html.parser").find("article")
    for gone in article.select("script, style, details"):
        gone.decompose()
    shown = len(article.select("img, svg, table, div.cell_output input"))
    code = sum(count_words(cell.get_text()) for cell in article.select("div.cell_input"))
    outputs = article.select("div.cell_output")
    # Paragraphs in an output are prose that a cell has rendered.
    said = sum(count_words(p.get_text(" ")) for out in outputs for p in out.select("p"))
    printed = sum(count_words(out.get_text(" ")) for out in outputs) - said
    for cell in article.select("div.cell"):
        cell.decompose()
    prose = count_words(article.get_text(" ")) + said
    return round(prose / 170 + code / 100 + printed / 250 + shown / 2)


def fill_in_minutes(app, exception):
    """Write each page's reading time into `<span class="minutes" data-page="...">` of the index."""
    if exception is not None or app.builder.format != "html":
        return
    index = Path(app.outdir) / f"{app.config.root_doc}.html"

    def filled(found):
        page = index.parent / f"{found[2]}.html"
        text = f"({reading_minutes(page.read_text(encoding='utf-8'))} min)" if page.exists() else ""
        return f"{found[1]}{text}</span>"

    spans = re.compile(r'(<span class="minutes" data-page="([\w-]+)">)[^<]*</span>')
    index.write_text(spans.sub(filled, index.read_text(encoding="utf-8")), encoding="utf-8")


# A negative percentage followed by a word that already tells the direction: "-3 % more".
TURNED = re.compile(
    r"[-−]\d[\d.,]* ?% (?:more|less|fewer|slower|faster|longer|shorter|smaller|larger|of the)\b"
)


def turned_shares(text):
    """Every phrase like "-3 % more" in a text: its sign contradicts or repeats its words."""
    return TURNED.findall(" ".join(text.split()))


def check_pages(app, exception):
    if exception is None and app.builder.format == "html":
        for page, href in dead_links(app.outdir):
            logger.warning("%s: dead link %r", page, href, type="book")
        for page in sorted(Path(app.outdir, "chapters").glob("*.html")):
            article = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser").article
            for share in turned_shares(article.get_text(" ")):
                logger.warning("%s says %r", page.name, share, type="book")


def setup(app):
    app.add_directive("calculator", CalculatorOnPage)
    app.connect("config-inited", add_vendored_scripts)
    # The theme adds its own buttons at priority 501.
    app.connect("html-page-context", add_launch_buttons, priority=900)
    app.connect("html-page-context", drop_doubled_scripts, priority=901)
    app.connect("build-finished", fill_in_minutes)
    app.connect("build-finished", check_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
