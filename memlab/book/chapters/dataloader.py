"""What chapter 11 runs and draws: data sets whose cost is set, loops that note who did what when.

An event is (what, who, from, to), in seconds of `time.perf_counter`; who is a process, or the
device, which waits, copies and computes.
"""

import gc
import itertools
import math
import os
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from memlab import models
from memlab.book import show
from memlab.book.chapters.loading import schedule
from memlab.gpus import find_gpu
from memlab.predict.measure import synchronize
from memlab.units import MiB

FORK = {"multiprocessing_context": "fork"}
INKS = {"load": "temporary", "copy": "gradients", "compute": "parameters"}


class Texts(Dataset):
    """Blocks of token ids; loading one costs a sleep of `wait` seconds and `rounds` of work."""

    def __init__(self, ids: torch.Tensor, wait: float = 0.0, rounds: int = 0):
        self.ids, self.wait, self.rounds = ids, wait, rounds
        self.packed = zlib.compress(bytes(range(256)) * 400)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        began = time.perf_counter()
        time.sleep(self.wait)  # stands for a disk or a network
        for _ in range(self.rounds):
            zlib.decompress(self.packed)  # real work
        span = [os.getpid(), began, time.perf_counter()]
        span = torch.tensor(span, dtype=torch.float64)
        return {"index": i, "input_ids": self.ids[i], "span": span}


def reader(device, seed: int = 0, entries: int = 1024):
    """(a GPT-2 of two layers for a vocabulary of so many entries, its AdamW)."""
    config = models.config("gpt2-tiny")
    config.vocab_size = entries
    model = models.build(config, attention="sdpa", seed=seed).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(loader, model, optimizer) -> tuple[list, list, list]:
    """One epoch: (losses, numbers of the samples as they came, events)."""
    losses, seen, events, asked = [], [], [], time.perf_counter()
    for batch in loader:
        got = time.perf_counter()
        words = batch["input_ids"].to(model.device, non_blocking=True)
        synchronize(model.device)
        copied = time.perf_counter()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        done = time.perf_counter()
        marks = {"wait": (asked, got), "copy": (got, copied), "compute": (copied, done)}
        events += [(what, "device", *span) for what, span in marks.items()]
        events += [("load", *span) for span in batch["span"].tolist()]
        seen, asked = seen + batch["index"].tolist(), done
    return losses, seen, events


def spent(events, what: str) -> float:
    """Seconds of one kind of event."""
    return sum(end - start for kind, _, start, end in events if kind == what)


def idle(events) -> float:
    """Share of the time after the first batch in which the device waited for the next."""
    _, *after = events  # the wait for the first batch
    return spent(after, "wait") / sum(spent(after, k) for k in ("wait", "copy", "compute"))


def runs_with_workers(load, ids, device, numbers=(0, 1, 2)) -> tuple[dict[int, list], float]:
    """(workers -> events of 80 samples, seconds that one sleeps: a batch takes 1.5 steps)."""
    entries = max(1024, int(ids.max()) + 1)
    loader = load(Texts(ids[:80]), 0)
    _, _, events = train(loader, *reader(device, entries=entries))
    steps = [end - start for what, _, start, end in events if what == "compute"]
    wait = 1.5 * statistics.median(steps) / loader.batch_size
    few = Texts(ids[:80], wait)
    fresh = {n: reader(device, entries=entries) for n in numbers}
    return {n: train(load(few, n), *fresh[n])[2] for n in numbers}, wait


def draw_lanes(runs: Mapping[int, list]):
    """Each process and the device as a lane of what it did when, a panel a number of workers."""
    from matplotlib.patches import Patch

    heights = [max(2, 1 + number) for number in runs]
    grid = dict(height_ratios=heights)
    fig, axes = show.figure(6.5, 4.4, nrows=len(runs), sharex=True, gridspec_kw=grid)
    for ax, (number, events) in zip(axes, runs.items(), strict=True):
        zero = min(begin for _, _, begin, _ in events)
        who = sorted({w for _, w, _, _ in events if w != "device"})
        rows = {"device": 0} | {w: k for k, w in enumerate(who, 1)}
        for kind, w, begin, end in events:
            if kind in INKS:
                ink = show.COLOURS[INKS[kind]]
                ax.barh(rows[w], left=begin - zero, width=end - begin, color=ink, height=0.7)
        names = ["main process" if w == os.getpid() else "worker" for w in who]
        ax.set_yticks(range(len(rows)), ["device", *names])
        title = f"workers: {number}, device idle {idle(events):.0%}"
        ax.set_title(title, loc="left", fontsize=10)
        ax.grid(axis="y", visible=False)
    axes[-1].set_xlabel("seconds")
    marks = [Patch(color=show.COLOURS[ink], label=name) for name, ink in INKS.items()]
    fig.legend(handles=marks, loc="outside lower center", ncols=3)


def against_schedule(runs: Mapping[int, list], wait: float) -> pd.DataFrame:
    """Seconds from the first batch to the end, by the schedule and as they were, a row a run."""
    rows = {}
    for workers, events in runs.items():
        samples, steps = (sum(e[0] == what for e in events) for what in ("load", "compute"))
        loads = [samples / steps * wait] * steps
        plan = schedule(loads, spent(events, "compute") / steps, workers)
        own = [e for e in events if e[1] == "device"]
        there = max(e[3] for e in own) - min(e[2] for e in own if e[0] == "copy")
        guess = plan[-1][3] - plan[0][2]
        row = {"predicted, s": guess, "measured, s": there, "error": show.error(guess, there)}
        rows[f"workers: {workers}"] = row
    return pd.DataFrame(rows).T


# ---------------------------------------------------------------- what a sample costs


def seconds_each(load: Callable[[], object], times: int = 20) -> float:
    """Of the processor, so that a busy machine makes nothing dearer."""
    load()  # the first is not like the others
    began = time.process_time()
    for _ in range(times):
        load()
    return (time.process_time() - began) / times


def costs(tokenizer, pages: Sequence[str]) -> dict[str, float]:
    """Seconds of a sample: ready ids, 512 tokens to make, 1 MiB to unpack, a server's answer."""
    passage = tokenizer.decode(tokenizer(" ".join(pages[:9]))["input_ids"][:511])
    megabyte = zlib.compress((" ".join(pages) * 3)[: 2**20].encode())
    ready = Texts(torch.zeros(8, 64))
    return {
        "ready ids": seconds_each(lambda: ready[0]),
        "tokenize 512 tokens": seconds_each(lambda: tokenizer(passage)),
        "decompress 1 MiB": seconds_each(lambda: zlib.decompress(megabyte)),
        "wait for a server": 0.02,  # set by hand
    }


# ---------------------------------------------------------------- how many workers


class Grid:
    """How busy a device is that sleeps for each step, by where loading happens, L/C and workers.

    busy: case -> share of the time. places: kind of loading -> cores that its workers may use,
    None for all. control: percentage points by which two runs of a case differ, at most.
    """

    COMPUTE, WINDOW = 0.012, 16  # seconds of a step; batches watched

    def __init__(self, load):
        self.load = load
        packed = Texts([]).packed
        self.one_round = seconds_each(lambda: zlib.decompress(packed), 200)
        cores = sorted(getattr(os, "sched_getaffinity", lambda _: [0, 1])(0))
        self.places = {"waiting": None, "work, 1 core": cores[:1]}
        if len(cores) > 1:
            self.places["work, 2 cores"] = cores[:2]
        few = (0, 1, 2, 4)
        self.cases = [("waiting", 0.5, w) for w in (0, 1, 4)] + [("waiting", 3, w) for w in few]
        self.cases += [("waiting", 8, w) for w in (0, 2, 4, 8)]
        self.cases += [(k, 2, w) for k in self.places if k != "waiting" for w in few]

    def busy_share(self, kind: str, ratio: float, workers: int) -> float:
        """Share of the time in which the device is busy, once the workers are at full load."""

        def begin(worker):  # what a worker does first: give up other cores
            if self.places[kind] and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self.places[kind])

        skip, each = 2 * workers, ratio * self.COMPUTE  # prefetched while the workers start
        rounds = 0 if kind == "waiting" else round(each / self.one_round)
        blocks = torch.zeros(2 * skip + self.WINDOW + 1, 64)
        data = Texts(blocks, wait=0 if rounds else each, rounds=rounds)
        arrived, done = [], []
        how = dict(batch_size=1, worker_init_fn=begin if workers else None, born="fork")
        for _ in self.load(data, workers, **how):
            arrived.append(time.perf_counter())
            time.sleep(self.COMPUTE)
            done.append(time.perf_counter())
            if len(done) > skip + self.WINDOW:  # the workers are still at full load
                break
        return (sum(done[skip:-1]) - sum(arrived[skip:-1])) / (arrived[-1] - arrived[skip])

    def run(self):
        """All cases in random order, those of two workers and of one core twice."""
        again = [c for c in self.cases if c[2] == 2 or c[0] == "work, 1 core"]
        both, shares = self.cases + again, {}
        with warnings.catch_warnings(action="ignore"):  # of more workers than cores
            for n in np.random.default_rng(0).permutation(len(both)):
                shares.setdefault(both[n], []).append(self.busy_share(*both[n]))
        self.busy = {case: statistics.fmean(found) for case, found in shares.items()}
        self.control = 100 * max(abs(a - b) for a, b in (shares[c] for c in again))
        return self

    def predicted(self, kind: str, ratio: float, workers: int) -> float:
        """The share by the formula, with L/C from the run without workers."""
        alone = self.busy[kind, ratio, 0]
        if not workers:
            return alone
        limit = len(self.places[kind] or range(workers))
        return 1 / max(1, (1 / alone - 1) / min(workers, limit))

    def draw(self):
        """Measured dots on predicted lines, a panel a kind of loading."""
        fig, axes = show.figure(6.5, 3.3, ncols=len(self.places), sharey=True)
        tints = {0.5: "#0072b2", 2: "#cc79a7", 3: "#e69f00", 8: "#009e73"}
        for ax, kind in zip(axes, self.places, strict=True):
            for ratio, tint in tints.items():
                own = [c for c in self.cases if c[:2] == (kind, ratio)]
                if own:
                    x = [c[2] for c in own]
                    line = [self.predicted(*c) for c in own]
                    ax.plot(x, line, color=tint, label=f"L/C = {ratio}")
                    ax.plot(x, [self.busy[c] for c in own], "o", color=tint)
            ax.axvline(4, color=show.GREY, linestyle="--")
            ax.set(xlabel="workers", xlim=(-0.5, 8.5))
            ax.set_title(kind, fontsize=10)
            ax.set_xticks([0, 1, 2, 4, 8])
        axes[0].set(ylabel="device busy", ylim=(0, 1.08))
        pairs = [ax.get_legend_handles_labels() for ax in axes[:2]]
        handles, names = (sum(part, []) for part in zip(*pairs, strict=True))
        fig.legend(handles, names, loc="outside lower center", ncols=4)


# ---------------------------------------------------------------- copies and memory


def bandwidth(nbytes: int, pin: bool, device, times: int = 20) -> float:
    """GB/s of copies from the host to a device."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
    host.to(device)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        host.to(device, non_blocking=True)
    synchronize(device)
    return times * nbytes / (time.perf_counter() - began) / 1e9


def copies(batches: Mapping[str, int], device, clock=bandwidth) -> pd.DataFrame:
    """GB/s of pageable and pinned memory, interleaved, a row a batch (name -> bytes)."""
    names = ["pageable", "pinned", "pageable again"]
    rows = {}
    for name, nbytes in batches.items():
        turns = [[clock(nbytes, pin, device) for pin in (False, True, False)] for _ in range(5)]
        rows[name] = dict(zip(names, np.median(turns, axis=0), strict=True))
    return pd.DataFrame(rows).T


class _Own(Dataset):
    """Gives the characters of a batch of strings, and the worker's own bytes."""

    def __init__(self, store, count: int):
        self.store, self.count = store, count

    def __len__(self):
        return self.count

    def __getitems__(self, places):  # a whole batch at once
        if self.store is None:
            rows = []
        elif hasattr(self.store, "column_names"):  # a datasets.Dataset
            rows = self.store[places]["text"]
        else:
            rows = [self.store[i] for i in places]
        return sum(map(len, rows)), psutil.Process().memory_full_info().uss


def private(store, count: int) -> tuple[tuple[int, ...], int]:
    """(private bytes of one worker after each of 20 batches, characters that it read)."""
    how = dict(num_workers=1, collate_fn=tuple, worker_init_fn=lambda worker: gc.freeze())
    loader = DataLoader(_Own(store, count), batch_size=count // 20, **how, **FORK)
    lengths, own = zip(*loader, strict=True)
    return own, sum(lengths)


def draw_private(held: Mapping[str, Sequence[int]]):
    """Private memory above that of the first batch, a line a store."""
    fig, ax = show.figure(6.5, 3)
    inks = itertools.cycle([show.GREY, "#d55e00", "#0072b2", "#009e73"])
    for ink, (name, own) in zip(inks, held.items(), strict=False):
        ax.plot([(n - own[0]) / MiB for n in own], color=ink, label=name, lw=2)
    ax.set(xlabel="batches read by the worker", ylabel="private MiB more")
    fig.legend(loc="outside lower center", ncols=4)


# ---------------------------------------------------------------- sizes of products


def used(rows: int, columns: int, card: str, tile: int = 128) -> float:
    """Share of a card that works for the result of a product, by tiles and waves."""
    tiles = math.ceil(rows / tile) * math.ceil(columns / tile)
    at_once = find_gpu(card).processors
    return rows * columns / (math.ceil(tiles / at_once) * at_once * tile**2)


def draw_tiles(rows: int):
    """The share that is used by the width of a layer, a line a card."""
    fig, ax = show.figure(6.5, 2.8)
    widths = np.arange(64, 4097, 8)
    for card, ink in {"T4": "#0072b2", "A100-80GB": "#e69f00"}.items():
        line = [used(rows, int(w), card) for w in widths]
        ax.plot(widths, line, color=ink, label=card, lw=1.2)
    ax.set(xlabel="width of the layer", ylabel="share used", ylim=(0, 1.05))
    ax.legend(loc="lower right")


def gemm_seconds(columns: int, device, times: int = 20) -> float:
    """8,192 tokens times a layer from 768 to `columns`, in fp16."""
    x = torch.randn(8192, 768, dtype=torch.float16, device=device)
    w = torch.randn(columns, 768, dtype=torch.float16, device=device)
    x @ w.T
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        x @ w.T
    synchronize(device)
    return (time.perf_counter() - began) / times


def gemm_ratios(odd: int, even: int, device, clock=gemm_seconds) -> dict[str, float]:
    """Time of the product with so many columns against the odd one, interleaved."""
    times = np.array([[clock(n, device) for n in (odd, even, odd)] for _ in range(5)])
    ratios = np.median(times / times[:, :1], 0)
    return dict(zip(["as it is", "padded", "as it is, again"], ratios, strict=True))
