"""The colours of figures and panels."""

from memlab.footprint import Category

GREY = "#808080"  # halfway between white and black: legible on both backgrounds
# One hue per category, in the order of `Category`. The hues are distinguishable for colour-blind
# readers (after Okabe and Ito) and have contrast against both backgrounds.
COLOURS: dict[str, str] = dict(
    zip(
        Category,
        "#0072b2 #e69f00 #009e73 #cc79a7 #d55e00 #56b4e9 #8c8c8c #b0a000 #a6a6a6".split(),
        strict=True,
    )
)
# The categories that inference calls by other names.
SERVING_COLOURS = COLOURS | {
    "weights": COLOURS[Category.PARAMETERS],
    "kv_cache": COLOURS[Category.OPTIMIZER_STATES],
    "logits": COLOURS[Category.GRADIENTS],
}
