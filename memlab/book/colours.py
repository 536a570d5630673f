"""The colours of figures and panels."""

from memlab.footprint import Category

GREY = "#808080"  # halfway between white and black: text that reads on both
# A hue a category that keeps apart for the colour-blind (after Okabe and Ito) and has contrast
# against both grounds.
COLOURS: dict[str, str] = dict(
    zip(
        Category,
        "#0072b2 #e69f00 #009e73 #cc79a7 #d55e00 #56b4e9 #8c8c8c #b0a000 #a6a6a6".split(),
        strict=True,
    )
)
# The same for what inference names otherwise.
SERVING_COLOURS = COLOURS | {
    "weights": COLOURS[Category.PARAMETERS],
    "kv_cache": COLOURS[Category.OPTIMIZER_STATES],
    "logits": COLOURS[Category.GRADIENTS],
}
