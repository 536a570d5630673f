"""Ranks that are really there: processes on the CPU, joined by gloo, each measured by the Meter."""

import multiprocessing
import os
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

# What every rank would import by itself, for two seconds.
from transformers import (  # noqa: F401
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from memlab import Meter
from memlab.workloads.training import Training


class RanksFailed(RuntimeError):
    """A rank ended with an error, or not all of them ended in time."""


def run_ranks(ranks: int, work, *given, folder: Path, seconds: float = 240) -> list:
    """What `work(*given)` gives in each of so many ranks, by their number.

    work: a function of a module, which every rank imports. folder: an empty one, where the ranks
    meet by a file, so that no port is taken. All ranks are ended when one fails or `seconds` have
    passed. Raises RanksFailed, with the rank's own words.
    """
    # Ranks are copies of one process that has the libraries and nothing else: importing takes each
    # five seconds.
    multiprocessing.set_forkserver_preload([__name__])
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        forkserver.ensure_running()
    context = processes.start_processes(
        _run_rank, (ranks, work, given, folder), ranks, join=False, start_method="forkserver"
    )
    end = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            if time.monotonic() > end:
                raise RanksFailed(f"{ranks} ranks did not end within {seconds} seconds")
    except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
        raise RanksFailed(str(error)) from None
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"{n}.pt", weights_only=False) for n in range(ranks)]


def _run_rank(rank, ranks, work, given, folder):
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    store = f"file://{folder}/ranks"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.save(work(*given), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measured(recipe):
    """(the footprint of a step after two or None, the mean losses of all), on this rank.

    The first rank's is measured. Of two steps the smaller counts: gloo's threads hold a buffer for
    a moment longer than its collective takes.
    """
    training = Training(recipe)
    without_dropout(training)
    losses, footprints = [training.step() for _ in range(2)], []
    first = not dist.is_initialized() or dist.get_rank() == 0
    for _ in range(2):
        if not first:
            losses.append(training.step())
            continue
        with Meter("cpu", training.model, training.optimizer, training.inputs) as meter:
            losses.append(training.step())
        footprints.append(meter.footprint)
    return min(footprints, key=lambda one: one.peak_allocated, default=None), losses


def without_dropout(training) -> None:
    """Every rank would draw its own.

    In a model that is not trained, though, bitsandbytes packs 4-bit weights for the CPU: the model
    with those has no dropout.
    """
    training.model.train(training.recipe.base != "none")
