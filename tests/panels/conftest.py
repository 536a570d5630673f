import pytest
from panel_page import PanelPage


@pytest.fixture(scope="module")
def open_once(chromium, tmp_path_factory):
    """open_once(panels...): a page for a whole module; no complaint, no network."""
    pages = []

    def show(*panels, **how):
        pages.append(PanelPage(chromium, tmp_path_factory.mktemp("panels"), *panels, **how))
        return pages[-1]

    yield show
    for page in pages:
        page.close()
