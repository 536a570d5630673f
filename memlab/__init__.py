"""memlab: predict, measure and explain the GPU memory of training transformers.

A `Recipe` says what is trained; `simulate` and `formula` predict its memory, `measure` trains it
here, `fits` answers for a card, and a `SimulatedGPU` takes any training loop. All of them give a
`Footprint`. The rooms behind this door:

- recipe, models, gpus, footprint, training, quantized: what is trained, on what, how it is said
- measuring, simulation, closed_form, derivation, planning, cli: the verbs
- card: the simulated GPU; trace: the log of memory, its depth and its allocator
- evidence: records of real runs, and the predictions beside them
- book: what the chapters share: figures, texts, exercises, claims, panels
"""

from memlab.lazy import door

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
}
__getattr__, __all__ = door("memlab", _HOMES, ("gpus", "models"))


def __dir__():
    return __all__
