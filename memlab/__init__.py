"""memlab: predict, measure and explain the GPU memory of training transformers.

A `Recipe` says what is trained; `simulate` and `formula` predict its memory, `measure` trains it
here, `fits` answers for a card, and a `SimulatedGPU` takes any training loop. All of them give a
`Footprint`. The packages behind it; each imports only from those below it:

- book: what the chapters share: figures, texts, lessons, exercises, claims, panels
- cli: the command; evidence: records of real runs, and the predictions beside them
- planner: the search for a recipe; export: the scripts that it writes
- predict: simulate, formula, fits, largest, measure; traces at all sizes
- workloads: the training loop, generation, quantized bases, sharding
- card: the simulated GPU; trace: what happens to memory, and the allocator that serves it
- spec: what is asked: recipes and servings

At the root: models and gpus, the catalogues; footprint, the answer; fields, libraries and units.
"""

import logging
from typing import TYPE_CHECKING

from memlab._lazy import door

if TYPE_CHECKING:  # the names below, as checkers see nothing of what `__getattr__` serves
    from memlab import gpus as gpus
    from memlab import models as models
    from memlab.book.exercise import check as check
    from memlab.book.explorer import explore as explore
    from memlab.book.show import compare as compare
    from memlab.card.device import SimulatedGPU as SimulatedGPU
    from memlab.evidence.records import find_records as find_records
    from memlab.footprint import Footprint as Footprint
    from memlab.gpus import find_gpu as find_gpu
    from memlab.planner.search import plan as plan
    from memlab.predict.fit import fits as fits
    from memlab.predict.fit import largest as largest
    from memlab.predict.formula import formula as formula
    from memlab.predict.measure import Measurement as Measurement
    from memlab.predict.measure import Meter as Meter
    from memlab.predict.measure import alive_tensors as alive_tensors
    from memlab.predict.measure import device_name as device_name
    from memlab.predict.measure import measure as measure
    from memlab.predict.measure import pick_device as pick_device
    from memlab.predict.measure import seconds as seconds
    from memlab.predict.measure import synchronize as synchronize
    from memlab.predict.simulate import simulate as simulate
    from memlab.spec.recipe import Recipe as Recipe
    from memlab.units import MiB as MiB
    from memlab.workloads.training import Training as Training

# transformers imports torchao wherever it is installed. It then names, with their paths, the
# kernels of its package that are for other machines, and PyTorch an old word that it uses.
logging.getLogger("torchao").addFilter(lambda one: not str(one.msg).startswith("Failed to load"))
logging.getLogger("torch.utils._pytree").addFilter(
    lambda one: "register_constant" not in str(one.msg)
)

# Name -> where it is defined. Loaded when it is first asked for, as most bring torch along.
_HOMES = {
    "Recipe": "spec.recipe",
    "Footprint": "footprint",
    "MiB": "units",
    "Training": "workloads.training",
    "find_gpu": "gpus",
    "simulate": "predict.simulate",
    "SimulatedGPU": "card.device",
    "formula": "predict.formula",
    "fits": "predict.fit",
    "largest": "predict.fit",
    "plan": "planner.search",
    "measure": "predict.measure",
    "Measurement": "predict.measure",
    "Meter": "predict.measure",
    "alive_tensors": "predict.measure",
    "device_name": "predict.measure",
    "pick_device": "predict.measure",
    "seconds": "predict.measure",
    "synchronize": "predict.measure",
    "find_records": "evidence.records",
    "check": "book.exercise",
    "compare": "book.show",
    "explore": "book.explorer",
}
if not TYPE_CHECKING:  # to checkers any name would be one of the package
    __getattr__, __dir__, __all__ = door("memlab", _HOMES, ("gpus", "models"))
