"""What live panels share: controls, a run in a process of its own that can be stopped, its end."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import ClassVar

from memlab.book.panel import read

VIEW = "application/vnd.jupyter.widget-view+json"
_CSS = read("explore.css")
STYLE = f"<style>\n{_CSS}</style>"
# JupyterLab says "model not found" where controls were, once the notebook was saved and reopened.
# The rule is for every widget of the notebook, of all of which the sentence is true.
ENDED = f"<style>\n{read('ended.css')}</style>"


class Live:
    """A panel of ipywidgets in a notebook with a kernel, and a still picture without one.

    A simulation replaces parts of torch while it runs. In another process it cannot meet a cell
    that trains at the same time, and it can be stopped.

    A subclass has `doing`, the word for a run; `work`, a function of a module, which the process
    runs; and the methods that raise here.
    """

    doing = ""
    work: ClassVar[Callable[..., object] | None] = None

    def __init__(self):
        self._pool: ProcessPoolExecutor | None = None
        self._running: Future | None = None
        self._box = None

    # -------------------------------------------------------------- of a subclass

    def begin(self) -> None:
        """Show the first result."""
        raise NotImplementedError

    def controls(self, widgets, **look) -> list:
        """The widgets above the button; look: what is the same for all."""
        raise NotImplementedError

    def asked(self) -> tuple:
        """What `work` is given for the controls as they are; a ValueError is shown."""
        raise NotImplementedError

    def is_shown(self, *asked) -> bool:
        """Whether what it would give is in sight already."""
        raise NotImplementedError

    def finish(self, *asked_and_result) -> None:
        """Show a result, by `show`."""
        raise NotImplementedError

    def still(self) -> str:
        """The panel without controls, as HTML."""
        raise NotImplementedError

    # -------------------------------------------------------------- what is shown

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        if self._box is None:
            self._build()
            self.begin()
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        display(HTML(ENDED))
        display({VIEW: view, "text/html": self.still(), "text/plain": repr(self)}, raw=True)

    def _build(self) -> None:
        import ipywidgets as widgets

        look = {
            "style": {"description_width": "9em"},
            "layout": widgets.Layout(width="min(26em, 98%)"),
        }
        controls = self.controls(widgets, **look)
        self._run = widgets.Button(description="Run", icon="play", button_style="primary")
        self._stop = widgets.Button(description="Stop", icon="stop", disabled=True)
        self._said, self._shown, self._code = (widgets.HTML() for _ in range(3))
        self._run.on_click(lambda _: self.start())
        self._stop.on_click(lambda _: self.stop())
        buttons = widgets.HBox([self._run, self._stop])
        self._box = widgets.VBox([*controls, buttons, self._said, self._shown, self._code])

    def show(self, picture: str, *codes: str) -> None:
        """Put HTML and what can be copied in their places."""
        self._say("")
        self._shown.value = f'{STYLE}<div class="memlab-explore">{picture}</div>'
        self._code.value = "".join(f"<pre>{html.escape(code)}</pre>" for code in codes)

    def _say(self, text: str, wrong: bool = False) -> None:
        role = "alert" if wrong else "status"
        text = html.escape(text) if wrong else text
        self._said.value = f'<div role="{role}">{text}</div>'

    # -------------------------------------------------------------- runs

    def start(self) -> None:
        """Do what is chosen, in the background."""
        if self._running is not None:
            return
        try:
            asked = self.asked()
        except ValueError as error:
            self._say(str(error), wrong=True)
            return
        if self.is_shown(*asked):
            self._say("this run is shown below already")
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._run.disabled, self._stop.disabled = True, False
        self._running = self._pool.submit(type(self).work, *asked)
        threading.Thread(target=self._watch, args=(self._running, asked), daemon=True).start()

    def stop(self) -> None:
        """End the run that is under way; nothing of it is kept."""
        pool, self._pool = self._pool, None
        if pool is not None and self._running is not None:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown(wait=False)

    def _watch(self, run: Future, asked: tuple) -> None:
        began = time.monotonic()
        while not run.done():
            self._say(f"<progress></progress> {self.doing}, {time.monotonic() - began:.0f} s")
            time.sleep(0.5)
        try:
            self.finish(*asked, run.result())
        except ValueError as error:
            self._say(str(error), wrong=True)
        except BrokenProcessPool:
            self._say("stopped")
        finally:
            self._running = None
            self._run.disabled, self._stop.disabled = False, True
