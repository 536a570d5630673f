"""torchao's optimizers on the simulated card: the step that they have compiled.

`torchao.optim.adam.single_param_adam` takes one parameter. Its code, run as it is, would hold some
ten tensors of that parameter's size, in fp32 and int64, which compiled code keeps in registers.
"""

import sys

from memlab.trace.tensors import inner_tensors

COMPILED = (
    "torchao's compiled step: kernels of one parameter at a time that read and write its gradient, "
    "its states and itself, and take no memory of their own"
)


def is_its_step(function) -> bool:
    """Whether a function that is to be compiled is the step of torchao's Adam."""
    adam = sys.modules.get("torchao.optim.adam")
    return adam is not None and function is getattr(adam, "single_param_adam", None)


def fused_step(p, grad, step, exp_avg, exp_avg_sq, max_exp_avg_sq, *settings) -> None:
    """What is read and written once each: the gradient by the parameter's own kernel."""
    p.add_(grad)
    for state in (exp_avg, exp_avg_sq, max_exp_avg_sq):
        if state is not None:
            # The table of what the codes stand for is read only.
            for part in inner_tensors(state)[:2]:
                part.mul_(1)
