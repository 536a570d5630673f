"""memlab: predict, measure and explain the GPU memory of training transformers.

A `Recipe` says what is trained; `simulate` predicts its memory, `measure` trains it
here, `fits` answers for a card, and a `SimulatedGPU` takes any training loop. All of them give a
`Footprint`. The packages behind it; each imports only from those below it:

- book: what the chapters share: figures, texts, lessons, exercises, claims, panels
- cli: the command; evidence: records of real runs, and how often predictions fall short
- planner: the search for a recipe; export: the scripts that it writes
- predict: simulate, fits, largest, measure; traces at all sizes
- workloads: the training loop, generation, quantized bases, sharding
- card: the simulated GPU; trace: what happens to memory, and the allocator that serves it
- spec: what is asked: recipes and servings

At the root: models and gpus, the catalogues; footprint, the answer; fields, libraries and units.
"""

import logging

import lazy_loader

# transformers imports torchao wherever it is installed. It then names, with their paths, the
# kernels of its package that are for other machines, and PyTorch an old word that it uses.
logging.getLogger("torchao").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load")
)
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "register_constant" not in str(record.msg)
)

# bitsandbytes tells every process without a GPU of an optional kernel for 4-bit products on CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# The names, and where each lives, are those of the stub beside; a name is loaded when it is first
# asked for, as most bring torch along.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
