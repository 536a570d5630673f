"""The tables of the page on accuracy: published runs beside the kept predictions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import pandas as pd

from memlab import gpus
from memlab.book import show
from memlab.card.step_time import BEST, EXPECTED, WORST
from memlab.evidence.accuracy import Comparison, compare_kept, compare_seconds, ratio_errors
from memlab.evidence.loops import kept_predictions
from memlab.evidence.records import Record, find_records, load, published_files
from memlab.predict import fit
from memlab.units import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

# Group of runs -> their file, and the technique where the file has several.
REGIMES = {
    "full, V100, 2022": ("published-source-001.json", "full"),
    "full, T4": ("published-preflight-t4.json", None),
    "LoRA fp16, T4": ("published-fitcheck-t4.json", "LoRA"),
    "LoRA NF4, T4": ("published-fitcheck-t4.json", "QLoRA"),
    "PEFT bf16, L40S": ("published-peft-l40s.json", None),
    "torchtune, A100": ("published-torchtune-a100.json", None),
    "FSDP bf16, H100": ("published-torchtitan-h100.json", None),
}
# Groups that no rule was looked for in.
OTHERS = {
    "PEFT, L40S": "published-peft-l40s.json",
    "torchtune, A100": "published-torchtune-a100.json",
    "torch-preflight, T4": "published-preflight-t4.json",
    "torchtitan, H100": "published-torchtitan-h100.json",
}
SOURCES = {
    "published-neusight.json": "fp32 passes, four cards",
    "published-source-001.json": "BERT-large, V100",
    "published-bert-v100-a100.json": "NVIDIA's BERT, V100, A100",
    "published-fitcheck-t4.json": "LoRA, QLoRA, T4",
    "published-peft-l40s.json": "PEFT's methods, L40S",
    "published-llm-foundry-a100.json": "MPT, FSDP, 8 to 128 A100",
    "published-llm-foundry-h100.json": "MPT, FSDP, 8 to 64 H100",
    "published-torchtitan-h100.json": "Llama 3.1 8B, FSDP, H100",
    "published-fsdp-qlora-rtx.json": "Llama 2 7B, 2 GeForce cards",
}
LESS_1 = "less 1 (size: without its sign)"
READ_OFF = "lora rank32"  # gave a length, so it is no evidence of bytes
WHY = {
    "adalora rank32": "PEFT's release of today trains a constant",
    "osf rank128": "PEFT's release of today keeps less",
    "prefixtuning lr_0.001": "a batch whose length is not known",
    "prefixtuning lr_0.005_zero_init": "the same",
    "+ 8-bit AdamW": "torchao's optimizer, probably",
    "resnet50 32 x 224": "cuDNN's workspaces, probably",
}


def every_run() -> pd.DataFrame:
    """Every figure of bytes of every published run with its `regime`, its error, and `short`:
    whether it took more than `fits` asks room for. The run that gave a length is left out."""
    every = pd.concat(
        pd.DataFrame([one.as_dict() for one in compare_kept(file)])
        .query("technique == @kind" if kind else "index >= 0")
        .assign(regime=regime)
        for regime, (file, kind) in REGIMES.items()
    )
    sized = every[(every["figure"] != "seconds") & every["error"].notna()]
    sized = sized[sized["name"] != READ_OFF]
    asked = (1 + fit.MARGIN) * sized["predicted"].astype(float) + fit.CONTEXT_MARGIN
    return sized.assign(short=asked < sized["recorded"].astype(float))


def of_room(sized: pd.DataFrame) -> pd.DataFrame:
    """The figures that `fits` asks room for: all but what is allocated."""
    return sized[sized["figure"] != "allocated"]


def glance(sized: pd.DataFrame) -> Styler:
    """Lowest and highest error and the median of their sizes, of each group; the lowest first."""
    groups = ["regime", "figure"]
    rows = sized.groupby(groups, sort=False)
    table = pd.DataFrame(
        {
            "lowest": rows["error"].min(),
            "highest": rows["error"].max(),
            "median size": rows["error"].agg(lambda e: e.abs().median()),
            "runs": rows.size(),
            "short": of_room(sized).groupby(groups)["short"].sum(),
        }
    ).sort_values("lowest")
    table.index = pd.Index([f"{regime}: {figure}" for regime, figure in table.index])
    styles: dict[Any, Any] = dict.fromkeys(table.columns[:2], "{:+.1%}")
    styles |= {"median size": "{:.1%}", "short": "{:.0f}"}
    caption = f"Bytes: simulated over real, {LESS_1}; short: runs that took more than fits asks"
    return table.style.format(styles, na_rep="—").set_caption(caption)


def glance_figure(sized: pd.DataFrame) -> Figure:
    """Real peaks and the errors of their predictions, a mark a group; the band is `fits`'s."""
    fig, ax = show.figure(7, 4)
    kept_free = 100 * fit.MARGIN
    ax.axhspan(-kept_free, kept_free, color=show.GREY, alpha=0.15)
    ax.axhline(0, color=show.GREY, linewidth=0.8)
    by_regime = of_room(sized).groupby("regime", sort=False)
    looks = zip(show.COLOURS.values(), "Xo^vsD*", by_regime, strict=False)
    for colour, marker, (regime, rows) in looks:
        real, error = rows["recorded"] / 2**30, 100 * rows["error"]
        ax.plot(real, error.astype(float), marker, color=colour, label=regime)
    ax.set(xlabel="real peak, GiB", ylabel="error, %", xlim=(0, None))
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def blind_answers() -> list[bool]:
    """Of the tries of twelve public questions that `fits` calls fitting, whether each fitted."""

    def kept_in(name: str) -> Any:
        return json.loads(resources.files("memlab.data").joinpath(name).read_text())

    answers = kept_in("answers.json")["answers"]
    return [
        size in question["fitted"]
        for question in kept_in("questions.json")["questions"]
        for size in question["fitted"] + question["failed"]
        if answers[question["url"]][str(size)]["fits"]
    ]


def verified_cards() -> list[str]:
    """The catalogue's cards that a published training was run on."""
    real = {gpus.gpu_of_device(run.device).name for run in find_records("published")}
    return [name for name in gpus.GPUS if name in real]


def nine_runs(published: list[Record]) -> pd.DataFrame:
    """The guide's nine runs by their published size, MiB: reserved and the printed context."""
    said = kept_predictions()["runs"]["published-source-001.json"]
    names = [run.name.replace("accumulation", "acc.") for run in published]
    names = [name.replace("checkpointing", "ckpt.") for name in names]
    real = pd.DataFrame([run.figures for run in published], index=names)
    guess = pd.DataFrame([said[run.name] for run in published], index=names)
    used = guess["peak_reserved_bytes"] + real["context_bytes"]
    nine = pd.DataFrame(
        {
            "simulated": used / MiB,
            "published": real["device_used_bytes"] / MiB,
            "error": used / real["device_used_bytes"] - 1,
        }
    ).sort_values("published")
    nine["place simulated"] = nine["simulated"].rank().astype(int)
    return nine


def of_formula(rows: Mapping[str, tuple[Any, Any]]) -> pd.DataFrame:
    """The formula's allocated bytes and its range of reserved ones beside a simulation's.

    rows: label -> (Footprint by the formula, Footprint simulated).
    """
    table = {}
    for name, (quick, run) in rows.items():
        ends = [end / run.peak_reserved - 1 for end in quick.reserved_range]
        table[name.replace("adamw_torch_", "").replace("checkpointing", "ckpt.")] = {
            "MiB": quick.peak_allocated / MiB,
            "error": quick.peak_allocated / run.peak_allocated - 1,
            "error, low": ends[0],
            "error, high": ends[1],
        }
    return pd.DataFrame(table).T


def t4_errors() -> pd.DataFrame:
    """fitcheck's LoRA trainings on a T4: base, attention, errors, transformers' release, and
    whether what was reserved lies in the range of the ways of loading (None without a range)."""
    said = kept_predictions()["runs"]["published-fitcheck-t4.json"]
    rows = []
    for run in find_records("published", loop="fitcheck"):
        row: dict[str, Any] = {"base": {"none": "fp16", "nf4": "NF4"}[run.recipe["base"]]}
        row |= {"attention": run.recipe["attention"], "release": run.versions["transformers"]}
        for kind in ("allocated", "reserved"):
            figure = f"peak_{kind}_bytes"
            row[kind] = said[run.name][figure] / run.figures[figure] - 1
        bounds = said[run.name]["reserved_range_bytes"]
        real = run.figures["peak_reserved_bytes"]
        row["inside"] = bounds[0] <= real <= bounds[1] if bounds else None
        rows.append(row)
    return pd.DataFrame(rows)


def t4_table(frame: pd.DataFrame) -> Styler:
    """`t4_errors` by base and attention."""
    groups = frame.groupby(["base", "attention"])
    rows: dict[tuple[str, str], Any] = {("", "runs"): groups.size()}
    for kind in ("allocated", "reserved"):
        rows[kind, "median size"] = groups[kind].agg(lambda e: e.abs().median())
        rows[kind, "low"] = groups[kind].min()
        rows[kind, "high"] = groups[kind].max()
    table = pd.DataFrame(rows)
    errors: dict[Any, Any] = dict.fromkeys(table.columns[1:], "{:+.2%}")
    errors |= {(kind, "median size"): "{:.2%}" for kind in ("allocated", "reserved")}
    return table.style.format(errors).set_caption(f"T4: simulated over measured, {LESS_1}")


def others() -> pd.DataFrame:
    """Every figure of bytes of the groups `OTHERS`, also in MiB."""
    found = pd.DataFrame(
        one.as_dict() | {"group": group}
        for group, file in OTHERS.items()
        for one in compare_kept(file)
        if one.figure != "seconds" and one.name != READ_OFF
    )
    both = found[["predicted", "recorded"]].astype(float) / MiB
    found[["simulated", "published"]] = both
    return found


def others_table(said: pd.DataFrame) -> Styler:
    """Errors by group and figure."""
    each = said.groupby(["group", "figure"], sort=False)["error"]
    size = said["error"].abs().groupby([said["group"], said["figure"]])
    table = pd.DataFrame(
        {
            "median size": size.median(),
            "95 % size": size.quantile(0.95),
            "low": each.min(),
            "high": each.max(),
            "runs": each.size(),
        }
    ).sort_index()
    table.index = pd.Index([f"{group}: {figure}" for group, figure in table.index])
    errors: dict[Any, Any] = dict.fromkeys(["median size", "95 % size"], "{:.2%}")
    errors |= dict.fromkeys(["low", "high"], "{:+.2%}")
    return table.style.format(errors).set_caption(f"Simulated over published, {LESS_1}")


def far_off(said: pd.DataFrame) -> pd.DataFrame:
    """What is more than 2 % off, with the reason as far as it is known."""
    off = said[said["error"].abs() > 0.02].set_index("name")
    off["why"] = off.index.map(lambda name: WHY.get(name, "not known"))
    return off[["error", "figure", "why"]]


def moved_by_release(found: pd.DataFrame) -> dict[str, float]:
    """PEFT's runs whose error with the release of the runs is another one, and that error."""
    today = found[found["group"] == "PEFT, L40S"].set_index("name")["error"]
    then = compare_kept(OTHERS["PEFT, L40S"], release=True)
    errors = {
        one.name: one.error
        for one in then
        if one.error is not None and one.figure != "seconds" and one.name != READ_OFF
    }
    return {name: e for name, e in errors.items() if abs(e - today[name]) > 0.005}


def refusals(found: pd.DataFrame) -> list[str]:
    """Runs that are not simulated, with the reason in short."""
    refused = found[found["refused"] != ""].set_index("name")["refused"]
    return [f"{name} ({shorten(why, 60)})" for name, why in refused.items()]


def timed() -> dict[str, list[Comparison]]:
    """Source -> the published seconds of its steps beside the kept estimates."""
    return {SOURCES[file]: runs for file, runs in compare_seconds().items()}


def _of_errors(runs: list[Comparison]) -> dict[str, float]:
    errors = pd.Series([one.error for one in runs], dtype=float)
    inside = sum(bool(one.inside) for one in runs) / len(runs)
    return {
        "runs": len(runs),
        "error": errors.median(),
        "size": errors.abs().median(),
        "in range": inside,
    }


def by_source(found: Mapping[str, list[Comparison]]) -> pd.DataFrame:
    """Of each source the runs, the median error with and without its sign, the share inside the
    range, and the median error of ratios of two runs of one model at one length."""
    rows = {}
    for file, name in SOURCES.items():
        ratios = pd.Series(ratio_errors(file), dtype=float).abs().median()
        rows[name] = _of_errors(found[name]) | {"ratios": ratios}
    return pd.DataFrame(rows).T


def by_format(
    found: Mapping[str, list[Comparison]],
    cards: Iterable[str] = ("RTX-4090", "A100", "H100", "V100"),
) -> pd.DataFrame:
    """The same by card and by the format of the products, of every published run on these cards.

    cards: beginnings of the catalogue's names.
    """
    rows: dict[str, list[Comparison]] = {}
    sources: dict[str, set[str]] = {}
    for file, name in SOURCES.items():
        runs = {run.name: run for run in load(published_files()[file])}
        for one in found[name]:
            run = runs[one.name]
            card = gpus.gpu_of_device(run.device).name
            family = next((c for c in cards if card.startswith(c)), None)
            if family is None:
                continue
            whole = run.recipe.get("precision", "fp32") == "fp32"
            row = f"{family}, {'fp32' if whole else '16 bits'}"
            rows.setdefault(row, []).append(one)
            sources.setdefault(row, set()).add(name)
    order = [f"{card}, {kind}" for card in cards for kind in ("fp32", "16 bits")]
    table = {
        row: _of_errors(rows[row]) | {"of": "; ".join(sorted(sources[row]))}
        if row in rows
        else {"runs": 0}
        for row in order
    }
    return pd.DataFrame(table).T.infer_objects()


def seconds_table(table: pd.DataFrame, caption: str) -> Styler:
    """`by_source` or `by_format`, in per cent."""
    formats: dict[Any, Any] = {"runs": "{:.0f}", "error": "{:+.0%}"}
    formats |= {name: "{:.0%}" for name in ("size", "in range", "ratios") if name in table}
    return table.style.format(formats, na_rep="—").set_caption(caption)


def seconds_figure(found: Mapping[str, list[Comparison]]) -> Figure:
    """Published seconds and the errors of their estimates, a mark a source."""
    fig, ax = show.figure(7, 4.2)
    for colour, marker, name in zip(
        show.COLOURS.values(), "Xo^vsD*P", SOURCES.values(), strict=False
    ):
        real = [one.recorded for one in found[name]]
        off = [100 * (one.error or 0) for one in found[name]]
        ax.plot(real, off, marker, color=colour, label=name, alpha=0.7)
    ax.axhline(0, color=show.GREY, linewidth=0.8)
    ax.axhspan(-15, 15, color=show.GREY, alpha=0.15)
    ax.set(xscale="log", xlabel="real, s a step", ylabel="error, %")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def all_ratio_errors() -> pd.Series:
    """Errors of ratios of two steps, of every source: `memlab.evidence.accuracy.ratio_errors`."""
    return pd.Series([error for file in SOURCES for error in ratio_errors(file)])


def shares_table() -> Styler:
    """The shares and times that hold for all cards."""
    reach = {"best": BEST, "expected": EXPECTED, "worst": WORST}
    assumed = pd.DataFrame({name: vars(one) for name, one in reach.items()})
    assumed.loc[["kernel", "forward", "backward", "update", "inference"]] *= 1e6
    assumed.index = pd.Index(
        [
            "products, of what large ones reach",
            "fused attention, the same",
            "bytes, of what simple kernels reach",
            "L2 cache, times the memory's rate",
            "8-bit states, clocks an element",
            "shortest kernel, us",
            "host, an operator forward, us",
            "host, backward, us",
            "host, update, us",
            "host, inference, us",
            "link between ranks, of its rate",
            "collectives, hidden behind other work",
        ]
    )
    return assumed.style.format("{:.2f}").set_caption("Shares and times of all cards")
