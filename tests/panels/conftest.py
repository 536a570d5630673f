from types import SimpleNamespace

import pytest
from panel_page import PanelPage

from memlab import panels
from memlab.card.kernels import sdpa
from memlab.trace.patches import replaced


@pytest.fixture(scope="module")
def open_once(chromium, tmp_path_factory):
    """open_once(panels...): a page for a whole module; no complaint, no network."""
    pages = []

    def show(*shown, **how):
        page = PanelPage(chromium, tmp_path_factory.mktemp("panels"), *shown, **how)
        # A calculator begins once it has unpacked its tables.
        page.run("new Promise(done => { const look = () => panel.dataset.begun === undefined || "
                 "panel.calculator || !panel.matches('.memlab-calculator') ? done() : "
                 "setTimeout(look, 20); look(); })")  # fmt: skip
        pages.append(page)
        return page

    yield show
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def calculator():
    """Its page, made once: the tables of all models take most of a minute."""
    page = panels.Calculator()._repr_html_()
    return SimpleNamespace(_repr_html_=lambda: page)


@pytest.fixture(scope="module")
def serving(open_once):
    """The calculator of inference, with kernels of the release that its tests compare with."""
    with replaced((sdpa, "SHARES_KEYS", sdpa.kernels_that_share_keys("2.13.0"))):
        return open_once(panels.ServingCalculator())
