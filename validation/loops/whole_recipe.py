"""memlab's own loop on a GPU without a memory limit, for runs with published seconds.

Sources: NVIDIA's BERT-large (DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md),
Databricks' llm-foundry (scripts/train/benchmarking/README.md) and Answer.AI's fsdp_qlora
(benchmarks_03_2024.md). Each recipe is the nearest one that memlab can express.

Assumptions, made before any prediction was compared:

- **Their fused kernels are not simulated.** In NVIDIA's and llm-foundry's code, layer norms, losses
  and attention are fused; in the recipe they are not. MPT is taken as a GPT-2 of its sizes without
  dropout.
- **FSDP1 is taken for FSDP2**, and its wrapped modules for whole layers.
- **Two GeForce GPUs send over PCI Express.** llm-foundry's machines send over eight ports of
  400 Gbit/s, although they have 1,600 Gbit/s together.
- **No sequence is padded.** NVIDIA's runs of 2021 may have left padding out. They were then faster.
"""

from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The footprint of the second step of `run.recipe`.

    `run.settings["link"]` is the link between ranks; without it, the GPU's own.
    """
    link = run.settings.get("link")
    return simulate(Recipe(**run.recipe), card.without_limit(), link=link)
