"""memlab's own loop on a card of as much memory as it takes, for runs whose seconds are published.

NVIDIA's BERT-large (DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md), Databricks'
llm-foundry (scripts/train/benchmarking/README.md) and Answer.AI's fsdp_qlora
(benchmarks_03_2024.md): each recipe is the nearest that can be said.

Assumptions, made before any prediction was compared:

- **Their fused kernels are not simulated.** NVIDIA's and llm-foundry's layer norms, losses and
  attention are fused where the recipe's are not; MPT is a GPT-2 of its sizes without dropout.
- **FSDP1 is taken for FSDP2**, and what it wraps for whole layers.
- **Two GeForce cards send over PCI Express**, llm-foundry's machines over eight ports of 400 Gbit/s
  where they have 1,600 Gbit/s together.
- **No sequence is padded.** NVIDIA's runs of 2021 may have left padding out, and are then quicker.
"""

from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The second step of `run.recipe`; `run.settings["link"]`: between ranks, None the card's."""
    link = run.settings.get("link")
    return simulate(Recipe(**run.recipe), card.without_limit(), link=link)
