"""Panels of a page on which readers try things out: calculators, and what shows a process.

Each is plain HTML with a script of its own: it needs neither a kernel nor a network.
"""

import lazy_loader

# A name is loaded when it is first asked for, as most bring torch along.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
