"""Loading and computing side by side: when each batch is made and used, drawn as lanes."""

from memlab.panels.panel import Panel

BATCHES = 200  # of the epoch that the panel computes
EVERY = 10  # of so many batches one is slower


def schedule(
    loads: list[float], compute: float, workers: int, prefetch: int = 2
) -> list[tuple[float, float, float, float]]:
    """(load from, to, compute from, to) of every batch in seconds, by PyTorch's rules.

    Batch n belongs to worker n modulo `workers`, batches are delivered in order, and no more than
    `prefetch` a worker are under way; without workers the loop itself loads.
    """
    plan, busy_until, done = [], [0.0] * max(1, workers), 0.0
    for n, load in enumerate(loads):
        asked = done
        if workers:
            waits_for = n - workers * prefetch  # with its delivery batch n is asked for
            asked = plan[waits_for][2] if waits_for >= 0 else 0.0
        begin = max(asked, busy_until[n % len(busy_until)])
        end = busy_until[n % len(busy_until)] = begin + load
        start = max(end, done)
        done = start + compute
        plan.append((begin, end, start, done))
    return plan


def waits(loads: list[float], workers: int, prefetch: int = 2) -> float:
    """Share of a schedule in which a device with steps of length 1 computes nothing."""
    plan = schedule(loads, 1, workers, prefetch)
    return 1 - len(plan) / (plan[-1][3] - plan[0][2])


def loads(seconds: float, uneven: float, workers: int, cores: int | None) -> list[float]:
    """Seconds to load each batch: `seconds` on average, one of ten `uneven` times the others.

    cores: where loading is a processor's work; workers beyond them take turns. None: it waits.
    """
    turns = max(1, workers / cores) if cores else 1
    usual = seconds * turns * EVERY / (EVERY - 1 + uneven)
    return [usual * uneven if n % EVERY == 4 else usual for n in range(BATCHES)]


def figures(
    seconds: float, compute: float, workers: int, cores: int | None, uneven: float, prefetch: int
) -> dict[str, float]:
    """What the panel says: idle, first, epoch, step and enough.

    idle: share of the time from the first batch to the end in which the GPU waits. first: seconds
    until the first batch is there. epoch: seconds of all batches. step: seconds a batch, from the
    first one on. enough: workers for a GPU that never waits in the long run, 0 if there are none.
    """
    plan = schedule(loads(seconds, uneven, workers, cores), compute, workers, prefetch)
    span = plan[-1][3] - plan[0][2]
    enough = max(1, next(w for w in range(1, 10**6) if w * compute >= seconds))
    return {
        "idle": 1 - BATCHES * compute / span,
        "first": plan[0][2],
        "epoch": plan[-1][3],
        "step": span / BATCHES,
        "enough": 0 if cores and enough > cores else enough,
    }


class LoaderLanes(Panel):
    """Workers and a GPU as lanes of time: who works when, and how long the GPU waits.

    workers, cores, prefetch: as the fields begin; seconds and compute: of loading a batch and of
    one step; uneven: how many times as long as the others every tenth batch takes.

    Raises ValueError for what the fields do not allow.
    """

    kind = "lanes"
    still = "This panel needs scripts. It shows how workers load batches while a GPU computes."
    # name: smallest, largest, step
    ALLOWED = {
        "workers": (0, 16, 1),
        "cores": (1, 16, 1),
        "prefetch": (1, 8, 1),
        "uneven": (1, 20, 1),
        "seconds": (0.001, 100, "any"),
        "compute": (0.001, 100, "any"),
    }

    def __init__(self, workers=2, cores=4, prefetch=2, uneven=1, seconds=0.06, compute=0.02):
        self.fields = dict(workers=workers, cores=cores, prefetch=prefetch, uneven=uneven)
        self.fields |= dict(seconds=seconds, compute=compute)
        for name, value in self.fields.items():
            least, most, step = self.ALLOWED[name]
            if not least <= value <= most or (step == 1 and value != int(value)):
                whole = "whole numbers" if step == 1 else "numbers"
                raise ValueError(f"{name} is {value}: allowed are {whole} from {least} to {most}")

    def data(self) -> dict:
        return {"fields": self.fields, "batches": BATCHES, "every": EVERY, "allowed": self.ALLOWED}
