"""torchao's low-bit optimizers on the simulated GPU.

They compile their step, `torchao.optim.adam.single_param_adam`, which updates one parameter. Run
eagerly, its code would allocate some ten tensors of the parameter's size, in fp32 and int64.
Compiled code keeps these values in registers, so a stand-in without temporaries replaces the step.
"""

import sys

from memlab.trace.tensors import inner_tensors

COMPILED = (
    "torchao's compiled step: kernels for one parameter at a time, which read and write it, its "
    "gradient and its states, and take no memory of their own"
)


def is_its_step(function) -> bool:
    """Whether a function passed to `torch.compile` is the step of torchao's Adam."""
    adam = sys.modules.get("torchao.optim.adam")
    return adam is not None and function is getattr(adam, "single_param_adam", None)


def fused_step(p, grad, step, exp_avg, exp_avg_sq, max_exp_avg_sq, *settings) -> None:
    """Read and write what the compiled step reads and writes, in place and without temporaries.

    In-place operators stand for its kernels, so that the bytes they move are counted.
    """
    p.add_(grad)  # reads the gradient, reads and writes the parameter
    for state in (exp_avg, exp_avg_sq, max_exp_avg_sq):
        if state is not None:
            # The codes and the scales are written. The third tensor, the table of the values that
            # the codes stand for, is only read.
            for part in inner_tensors(state)[:2]:
                part.mul_(1)
