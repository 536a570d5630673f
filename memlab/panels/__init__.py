"""Interactive panels of the pages: calculators, and animations of a process.

Each panel is plain HTML with its own script. It needs neither a kernel nor a network.
"""

import lazy_loader

# __init__.pyi lists the names. A name is imported at its first use, because some import torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
