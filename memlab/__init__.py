"""memlab: predict, measure and explain the GPU memory of training transformers.

A `Recipe` says what is trained; `simulate` and `formula` predict its memory, `measure` trains it
here, `fits` answers for a card, and a `SimulatedGPU` takes any training loop. All of them give a
`Footprint`. The rooms behind this door, in the order of the road that the data go:

- recipe (and its fields), models, gpus: what is trained, and on what
- training, quantized: the one loop, and real 4-bit and 8-bit layers
- card: the simulated GPU; trace: the log of memory, its depth and its allocator
- footprint, units: how the answer is said; lazy: how doors open
- serving, generation, serving_form: the same for inference, prefill and decode
- simulation, predict, measuring, closed_form, derivation, planning, cli: the verbs
- choosing, ways, splitting, plans: what to do, searched among what there is, and how it is told
- sharding, launching: several GPUs, and what starts them
- evidence: records of real runs, and the predictions beside them
- book: what the chapters share: figures, texts, lessons, exercises, claims, panels
- data: what is read from files
"""

import logging

from memlab.lazy import door

# transformers imports torchao wherever it is installed. It then names, with their paths, the
# kernels of its package that are for other machines, and PyTorch an old word that it uses.
logging.getLogger("torchao").addFilter(lambda one: not str(one.msg).startswith("Failed to load"))
logging.getLogger("torch.utils._pytree").addFilter(
    lambda one: "register_constant" not in str(one.msg)
)

# Name -> where it is defined. Loaded when it is first asked for, as most bring torch along.
_HOMES = {
    "Recipe": "recipe",
    "Footprint": "footprint",
    "MiB": "units",
    "Training": "training",
    "find_gpu": "gpus",
    "simulate": "simulation",
    "SimulatedGPU": "card.gpu",
    "formula": "closed_form",
    "derive": "derivation",
    "fits": "planning",
    "largest": "planning",
    "plan": "choosing",
    "measure": "measuring",
    "Measurement": "measuring",
    "Meter": "measuring",
    "alive_tensors": "measuring",
    "device_name": "measuring",
    "pick_device": "measuring",
    "seconds": "measuring",
    "synchronize": "measuring",
    "find_records": "evidence.records",
    "check": "book.exercise",
    "compare": "book.show",
    "explore": "book.explorer",
}
__getattr__, __dir__, __all__ = door("memlab", _HOMES, ("gpus", "models"))
