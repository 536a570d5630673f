"""The calculator of inference: a model that answers, on a card, by the formula of serving."""

import dataclasses

from memlab import models
from memlab.book.colours import SERVING_COLOURS
from memlab.fields import one_of
from memlab.gpus import ANY_CARD, GPUS, find_gpu
from memlab.panels.calculator import RULES, family, known_card
from memlab.panels.panel import Panel
from memlab.panels.panel import read as read_file
from memlab.predict.formula_serving import BYTES, TYPES, serving_formula, shape
from memlab.spec.serving import Serving

NAMES = [
    name
    for name in models.MODELS
    if not name.endswith("-tiny") and models.config(name).model_type in TYPES
]
FIELDS = ("batch_size", "prompt", "new_tokens", "weights", "all_logits")
HELD = ("weights", "kv_cache", "activations", "logits", "workspaces")


class ServingCalculator(Panel):
    """Weights, KV cache and the rest against a card, the largest batch, the longest prompt.

    The model is a named one or a config.json that a reader pastes, the card a named one or a number
    of GiB.

    serving: what it shows first, of a named model. gpu: the card. The page does what
    `memlab.predict.formula_serving` does. Raises ValueError for an unknown card, for a model
    without a form and for a serving outside the form's domain.
    """

    kind = "serving"
    still = "The calculator needs scripts. Without them, memlab serve on a command line says more."

    def __init__(self, serving: Serving | None = None, gpu: str = "T4"):
        self.serving = serving or Serving(
            "llama-3.1-8b", prompt=2048, new_tokens=256, weights="nf4"
        )
        self.card = find_gpu(gpu)
        one_of("model", self.serving.model, NAMES)
        one_of("gpu", self.card.name, GPUS)
        serving_formula(self.serving, self.card)

    def source(self) -> str:
        return super().source().replace("/* forms */", read_file("forms.js"))

    def data(self) -> dict:
        start = {name: getattr(self.serving, name) for name in FIELDS}
        usual = {one.name: one.default for one in dataclasses.fields(Serving)}
        return {
            "start": {"serve": self.serving.model, "gpu": self.card.name} | start,
            "defaults": {name: usual[name] for name in FIELDS},
            "models": {name: dataclasses.asdict(shape(name)) for name in NAMES},
            "bytes": BYTES,
            "families": {name: family(name) for name in TYPES},
            "widths": models.WIDTHS,
            # The last one lends its rules to a number of GiB.
            "cards": [known_card(card) for card in (*GPUS.values(), ANY_CARD)],
            "held": HELD,
            "colours": [SERVING_COLOURS[name] for name in HELD],
            "rules": RULES,
        }

    def __repr__(self) -> str:
        return f"ServingCalculator of {self.serving}"
