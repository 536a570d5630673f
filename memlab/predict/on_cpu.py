"""Simulate a step with the CPU's own kernels, to compare it with a real run on a CPU."""

from memlab.card import fake_tensors
from memlab.footprint import Footprint
from memlab.spec.recipe import Recipe
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training, import_libraries


def simulate_on_cpu(recipe: Recipe) -> Footprint:
    """The footprint of the second step on fake tensors, with the CPU's kernels and no allocator.

    No rule of CUDA applies, so a measured run on a CPU must give the same bytes. That tests the
    fake tensors, the tracer and the training loop. It says nothing about a GPU.
    """
    import_libraries(recipe)
    with fake_tensors.tensors_without_data(), Tracer() as tracer:
        training = Training(recipe, built_in=fake_tensors.without_draws())
        tracer.watch(training.model, inputs=training.inputs)
        training.step()  # optimizer states appear here, so the second step is the one to count
        tracer.reset_peak()
        training.step()
        return tracer.footprint()
