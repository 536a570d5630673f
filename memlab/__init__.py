"""memlab: predict, measure and explain the GPU memory of training transformers.

A `Recipe` describes a training. `simulate` predicts its memory on a GPU, and `measure` runs it on
this machine. `fits` says whether it fits a GPU. A `SimulatedGPU` runs any training loop. All of
them return a `Footprint`, or hold one. Each package imports only from the packages below it:

- panels: the calculators and other interactive panels of the pages
- book: helpers of the chapters: figures, texts, lessons, exercises, claims
- cli: the command line; evidence: records of real runs, and how often predictions fall short
- planner: the search for a recipe; export: the scripts that it writes
- predict: simulate, fits, largest, measure; traces that hold for all sizes
- workloads: the training loop, generation, quantized bases, sharding
- card: the simulated GPU; trace: the log of allocations, and the caching allocator that replays it
- spec: the descriptions of a workload: recipes and servings

At the root: the catalogues `models` and `gpus`, the result `footprint`, and the helpers `fields`,
`libraries`, `names` and `units`.
"""

import logging

import lazy_loader

# transformers imports torchao wherever torchao is installed. torchao then logs the path of each
# kernel library that does not load on this machine, and PyTorch logs a deprecated call of torchao.
logging.getLogger("torchao").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load")
)
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "register_constant" not in str(record.msg)
)

# On a machine without a GPU, bitsandbytes advertises an optional CPU kernel for 4-bit products.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# __init__.pyi lists the public names and their modules. A name is imported at its first use,
# because most of them import torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
