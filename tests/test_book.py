"""The rendered book, as a reader opens it: from the disk, without a network, in a real browser."""

import base64
import os
import re
import sys
from functools import cache
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from book_extras import dead_links, turned_shares
from browser import Browser
from contents import ROOT, listed_pages

from memlab.book.claims import CLAIMS

HTML = ROOT / "_build" / "html"

PHONE, DESKTOP = 390, 1280
REPORT = (Path(__file__).parent / "page_report.js").read_text()
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
# search.html and genindex.html belong to the book as well. The outer index.html only points on.
PAGES = sorted(
    path.relative_to(HTML).as_posix()
    for path in HTML.rglob("*.html")
    if path != HTML / "index.html" and "_static" not in path.parts
)
CHAPTERS = [page for page in PAGES if (ROOT / page).with_suffix(".ipynb").exists()]
OTHERS = [
    pytest.param(PHONE, "dark", marks=pytest.mark.slow),
    pytest.param(DESKTOP, "light", marks=pytest.mark.slow),
]
VIEWS = [(PHONE, "light"), (DESKTOP, "dark"), *OTHERS]

pytestmark = pytest.mark.rendered


# The tests of one page run in one process, which opens it once.
GROUPS = [pytest.param(page, marks=pytest.mark.xdist_group(page)) for page in PAGES]
every_page = pytest.mark.parametrize("page", GROUPS)


def url(page):
    return (HTML / page).as_uri()


@pytest.fixture(scope="session")
def visit(chromium: Browser):
    """visit(page, width, theme): what that page is like there; each is opened once."""

    @cache
    def look(page, width, theme):
        tab = chromium.open(url(page), width=width, theme=theme)
        try:
            report = tab.run(REPORT.replace("SCREEN_WIDTH", str(width)))
            return report | {"requests": tab.requests, "complaints": tab.complaints}
        finally:
            tab.close()

    return look


@pytest.fixture(autouse=True)
def built():
    if not PAGES:
        why = "there is no rendered book: make book"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)


def test_every_page_of_the_table_of_contents_is_there():
    assert {f"{file}.html" for file in listed_pages()} <= set(PAGES)


def test_the_index_says_how_long_every_chapter_takes():
    index = (HTML / "chapters" / "index.html").read_text(encoding="utf-8")
    said = dict(re.findall(r'class="minutes" data-page="([\w-]+)">\((\d+) min\)<', index))
    wanted = {Path(page).stem for page in CHAPTERS if "-deeper" not in page}
    wanted -= {"record"}  # which is run
    assert set(said) == wanted and all(0 < int(minutes) < 60 for minutes in said.values())


def test_the_ledger_has_every_statement_in_the_order_that_is_asked(chromium):
    tab = chromium.open(url("chapters/claims.html"), theme="dark")
    rows = """[...document.querySelectorAll("table.ledger tbody tr:not(.source)")]
              .map((row) => ({id: row.id, ...row.dataset}))"""
    click = "document.querySelector('.ledger-order button:nth-of-type({})').click()"
    of_sources = tab.run(rows)
    assert [row["id"] for row in of_sources] == [f"statement-{id}" for id in CLAIMS]
    for number, key in ((2, "verdict"), (3, "chapter")):
        tab.run(click.format(number))
        assert tab.run(rows) == sorted(of_sources, key=lambda row: int(row[key]))
    tab.run(click.format(1))
    assert tab.run(rows) == of_sources
    tab.close()


def test_a_page_is_printed_dark_on_white(chromium):
    tab = chromium.open(url("chapters/claims.html"), theme="dark")
    theme = "document.documentElement.dataset.theme"
    tab.run(f"addEventListener('beforeprint', () => (window.printed = {theme}))")
    tab.send("Page.printToPDF")
    assert (tab.run("window.printed"), tab.run(theme)) == ("light", "dark")
    tab.close()


def test_the_cheat_sheet_is_one_page_of_a4(chromium):
    tab = chromium.open(url("chapters/cheatsheet.html"))
    a4 = dict(paperWidth=8.27, paperHeight=11.69)
    printed = base64.b64decode(tab.send("Page.printToPDF", **a4)["data"])
    tab.close()
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1


@every_page
@pytest.mark.parametrize("width, theme", VIEWS)
def test_a_page_is_silent_readable_and_within_the_screen(visit, page, width, theme):
    """wide: beyond the screen. clipped: a column out of sight in a box that does not say that it
    scrolls. pale: contrast below 4.5 (large text: 3)."""
    report = visit(page, width, theme)
    faults = {name: report[name] for name in ("complaints", "wide", "clipped", "pale")}
    faults["away"] = [one for one in report["requests"] if not one.startswith(("file:", "data:"))]
    assert not any(faults.values()), faults
    assert report["theme"] == theme and report["texts"] > 10
    assert report["scroll_width"] <= width


def says_something(alt):
    """Alternative text that is there and is not the picture's file name."""
    pictures = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
    return bool(alt and alt.strip()) and not alt.strip().lower().endswith(pictures)


@every_page
def test_a_page_has_its_images_formulas_and_columns_and_no_path_of_a_machine(visit, page):
    phone, desktop = visit(page, PHONE, "light"), visit(page, DESKTOP, "dark")
    faults = {f"{kind}_formulas": phone[f"{kind}_formulas"] for kind in ("unset", "wrong", "raw")}
    faults |= {"ragged": phone["ragged"], "scrolling": desktop["scrolling"]}
    images = phone["images"]
    faults["images"] = [i for i in images if i["broken"] or not says_something(i["alt"])]
    text, own = desktop["text"], {str(ROOT), sys.prefix, str(Path.home()) + os.sep}
    faults["paths"] = [path for path in own if path in text]
    faults["cells"] = re.findall(r"\S*ipykernel_\d+\S*", text)  # a warning names a cell's file
    assert not any(faults.values()), faults


def test_a_share_whose_sign_says_what_its_words_say_is_found():
    assert turned_shares("takes -3.1%\nmore, or −12 % fewer; -0.4% away, +3 % more") == [
        "-3.1% more",
        "−12 % fewer",
    ]


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html">1</a><a href="b.html#there">2</a><a href="#top">3</a>'
        '<a href="c.html">4</a><a href="b.html#gone">5</a><a href="https://example.org/x">6</a>'
        '<a href="../outside.html">7</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there">B</p>')
    (tmp_path.parent / "outside.html").write_text("outside the book")
    assert dead_links(tmp_path) == [
        ("a.html", "c.html"),
        ("a.html", "b.html#gone"),
        ("a.html", "../outside.html"),
    ]


@pytest.mark.parametrize("page", CHAPTERS)
def test_launch_buttons_name_this_chapter(page):
    address, text = CONFIG["repository"]["url"], (HTML / page).read_text()
    chapter = page.replace(".html", ".ipynb")
    colab = address.replace("github.com", "colab.research.google.com/github")
    assert f'href="{colab}/blob/executed/{chapter}"' in text
    source = quote(f"{address}/blob/executed/{chapter}", safe="")
    assert f'href="https://kaggle.com/kernels/welcome?src={source}"' in text


@pytest.mark.parametrize(
    "asked, page",
    [
        ("gradient checkpointing", "08-checkpointing"),
        ("flash attention", "14-attention"),
        ("ZeRO-3", "17-parallel"),
        ("OOM", "cheatsheet"),
        ("Qwen3", "index"),
        ("mixed precision", "06-amp"),
        ("tokenizers", "09-tokenizers"),
    ],
)
def test_search_works_from_the_disk_and_knows_other_names(chromium, asked, page):
    tab = chromium.open(url("search.html") + f"?q={quote(asked)}")
    tab.run("""new Promise(done => {
        const look = () => document.querySelector('#search-results .search-summary')
            ?.textContent.match(/found|finished/i) ? done() : setTimeout(look, 50);
        look(); setTimeout(done, 5000);
    })""")
    hits = tab.run("[...document.querySelectorAll('#search-results a')].map(a => a.href)")
    complaints = tab.complaints
    tab.close()
    assert complaints == []
    assert url(f"chapters/{page}.html") in {re.split("[?#]", hit)[0] for hit in hits}
