"""One trace is the simulation of every micro-batch, length, rank and number of micro-batches."""

import gzip
import os

import pytest
import torch
from helpers import TINY
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CONFIG_MAPPING

from memlab import Recipe, models
from memlab.gpus import find_gpu
from memlab.libraries import has_changed_code
from memlab.predict.run import built
from memlab.predict.simulate import serve
from memlab.predict.store import Store
from memlab.predict.structure import TraceDomain, exact_structure, structures
from memlab.predict.trace_recorder import are_alike, record, run_log
from memlab.predict.traces import Traces
from memlab.trace.events import Alloc
from memlab.trace.symbols import largest_prime
from memlab.trace.trace import Depth, Trace

LLAMA = Recipe("llama-3-8b-tiny", seq_len=64, attention="sdpa", precision="bf16")
# Its learned positions begin after two that are not used.
OPT = models.resized(
    CONFIG_MAPPING["opt"](),
    **{"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "vocab_size": 512},
    num_attention_heads=4,
)
SHARDED = {"ranks": 4, "sharding": "zero3"}
WAYS = [
    (TINY, "P100"),
    (TINY.but(precision="fp16-amp", accumulation=3, checkpointing=True, max_grad_norm=1.0), "T4"),
    (Recipe("bert-large-tiny", optimizer="adafactor", padded=True, attention="sdpa"), "A100-80GB"),
    (LLAMA.but(lora_rank=4, checkpointing=True), "H100"),
    (LLAMA.but(precision="fp16-amp", lora_rank=4, base="half"), "V100"),
    (Recipe("t5-3b-tiny", seq_len=64, optimizer="adamw_8bit"), "T4"),
    (Recipe("deberta-v3-base-tiny", padded=True), "A100-80GB"),
    (Recipe("mixtral-8x7b-tiny", lora_rank=4, lora_targets="q_proj,v_proj"), "H100"),
    (LLAMA.but(precision="bf16-amp", lora_rank=4, base="half", **SHARDED), "A100-80GB"),
    (Recipe("lfm2-1.2b-tiny", precision="bf16-amp"), "A100-80GB"),  # convolutions of three tokens
    (Recipe(OPT, optimizer="adamw_8bit"), "T4"),
]
SIZES = ((2, 64, 3), (16, 256, 5), (1, 77, 1), (3, 333, 1))


def allocs(log):
    """The bytes of all that is made, in its order."""
    return [step.nbytes for _, step in log.events() if type(step) is Alloc]


def as_run(recipe, card, traces):
    """Assert that a recipe's trace makes and does what its own run does, to the byte."""
    assert traces.of(recipe, card)
    trace, run = traces.log(recipe, card), run_log(recipe, card)
    assert allocs(trace) == allocs(run)
    assert (trace.work, trace.weights) == (run.work, run.weights)
    trace, run = (serve(recipe, log, card) for log in (trace, run))
    assert trace.breakdown == run.breakdown
    assert trace.peak_reserved == run.peak_reserved
    assert trace.peak_phase == run.peak_phase


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("recipe", "gpu"), WAYS, ids=str)
def test_every_size_is_as_run(recipe, gpu):
    card = find_gpu(gpu)
    traces = Traces()
    for batch, length, accumulation in SIZES:
        sized = recipe.but(batch_size=batch, seq_len=length, accumulation=accumulation)
        if recipe.lora_rank:
            sized = sized.but(lora_rank=batch)
        as_run(sized, card, traces)


def test_sizes_are_told_from_what_ranks_gather_together():
    recipe = Recipe("mixtral-8x7b", batch_size=2, precision="bf16-amp", ranks=8, sharding="zero2")
    found = exact_structure(recipe, find_gpu("H100"))
    _, sizes = found.chosen(recipe, TraceDomain.of(recipe))
    around_the_layers = (2 * 32_000 + 1) * 4096  # embedding, norm and head
    assert all(around_the_layers % largest_prime(sizes[name]) for name in "bs")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "gpu"),
    [("qwen2.5-0.5b-tiny", "T4"), *((TINY.model, gpu) for gpu in ("T4", "H100", "A100-80GB"))],
)
def test_buffers_of_sums_are_those_of_the_sizes_and_the_card(model, gpu):
    """Qwen2 is recorded at widths at which the sums of its queries' biases need no buffer."""
    card, traces, buffers = find_gpu(gpu), Traces(), []
    for length in (64, 512):
        sized = TINY.but(model=model, batch_size=8, seq_len=length)
        as_run(sized, card, traces)
        allocs = [step for step in run_log(sized, card).steps if type(step) is Alloc]
        buffers.append(sum(step.reduction is not None for step in allocs))
    assert buffers[0] == 0 < buffers[1]  # 512 tokens are too few


def test_cards_that_attend_alike_share_the_trace_of_a_model_with_widths_of_its_own(tmp_path):
    """A model with one head of keys, whose dimension is swapped without a copy."""
    model = models.resized(models.config(LLAMA.model), num_key_value_heads=1)
    recipe, traces = LLAMA.but(model=model), Traces(Store(tmp_path))

    def recorded(*gpus):
        for gpu in gpus:
            as_run(recipe, find_gpu(gpu), traces)
        return len(list(tmp_path.iterdir()))

    first = recorded("A100-80GB")
    assert recorded("H100", "B200") == first
    second = recorded("RTX-3060")
    assert second > first
    assert recorded("RTX-4090", "RTX-5090") == second


def test_adapters_of_experts_repeat_with_the_layers():
    """PEFT makes them after those of all linear layers, and casts them layer by layer."""
    model = models.with_layers("mixtral-8x7b-tiny", 5)
    recipe = Recipe(model, precision="bf16-amp", lora_rank=4, base="half", seq_len=64)
    traces, card = Traces(), find_gpu("H100")
    assert traces.halves_of(recipe, card).halves[0].layers
    as_run(recipe, card, traces)


def test_a_base_in_4_bits():
    recipe = LLAMA.but(precision="bf16-amp", lora_rank=4, base="nf4", double_quant=True)
    card = find_gpu("L4")
    traces = Traces()
    for sized in (recipe.but(batch_size=16, seq_len=256), recipe.but(batch_size=9, seq_len=333)):
        as_run(sized, card, traces)


def test_few_tokens_on_a_base_in_4_bits_are_run():
    """bitsandbytes multiplies them without writing the weight out, by a table of cases."""
    recipe = LLAMA.but(lora_rank=4, base="nf4", batch_size=4)
    card, traces = find_gpu("L4"), Traces()
    assert traces.of(recipe, card) is None
    assert traces.of(recipe.but(batch_size=64), card) is not None
    assert traces.log(recipe, card) == run_log(recipe, card)


def test_a_window_has_a_trace_on_either_side():
    narrow = models.resized("mistral-7b-tiny", sliding_window=256)
    recipe, card = Recipe(narrow, seq_len=64, attention="sdpa", precision="bf16"), find_gpu("L4")
    traces = Traces()
    for length in (240, 256, 272, 512, 1024):
        as_run(recipe.but(seq_len=length), card, traces)
    inside = TraceDomain.of(recipe.but(seq_len=255))
    assert inside.inside and not TraceDomain.of(recipe.but(seq_len=256)).inside


def test_a_window_that_a_config_computes_is_one_too():
    """ModernBERT's is half its local attention; beyond it each pass makes a mask."""
    recipe, card = Recipe("modernbert-base-tiny", precision="bf16", attention="sdpa"), "L4"
    window, traces = models.config(recipe.model).sliding_window, Traces()
    for length in (window // 2, window, 4 * window):
        as_run(recipe.but(seq_len=length), find_gpu(card), traces)


def test_where_chunks_of_a_sequence_are_looped_over_each_size_is_run(monkeypatch):
    """Linear attention: 8 to 18 % were missing when such a trace was stretched.

    It is known beforehand: a trace that cannot agree was recorded for minutes.
    """
    monkeypatch.setattr("memlab.predict.trace_recorder.record", None)
    recipe = Recipe("qwen3.5-9b-tiny", seq_len=128, precision="bf16", attention="sdpa")
    card = find_gpu("A100-80GB")
    assert Traces().of(recipe, card) is None


@pytest.mark.slow
def test_what_somebody_has_changed_in_a_model_is_run(monkeypatch):
    from transformers.integrations import sdpa_attention
    from transformers.models.llama import modeling_llama

    assert not has_changed_code("llama")
    with monkeypatch.context() as patch:
        patch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda *tensors: False)
        assert has_changed_code("llama")
        recipe = Recipe("llama-3.2-1b", seq_len=128, attention="sdpa", precision="fp16-amp")
        card, traces = find_gpu("T4"), Traces()
        repeated = traces.log(recipe, card)
    assert not are_alike(repeated, traces.log(recipe, card))
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    assert has_changed_code("llama")
    assert not has_changed_code("gpt2")


def test_kernels_that_are_switched_off_are_asked_for_anew():
    """Of a model whose widths are its own, and of what has no trace."""
    card, traces = find_gpu("A100-80GB"), Traces()
    mixture = Recipe("mixtral-8x7b-tiny", seq_len=64, precision="bf16", attention="sdpa")
    for recipe in (mixture, mixture.but(loss="chunked")):
        fused = traces.log(recipe, card)
        with sdpa_kernel(SDPBackend.MATH):
            written_out = traces.log(recipe, card)
            assert are_alike(written_out, run_log(recipe, card))
        assert not are_alike(fused, written_out)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("recipe", "gpu"),
    (
        (LLAMA.but(precision="bf16-amp", optimizer="adamw_8bit", max_grad_norm=1.0), "A100-80GB"),
        (LLAMA.but(precision="fp16-amp", optimizer="adafactor"), "T4"),
        (LLAMA.but(lora_rank=4, optimizer="paged_adamw_8bit", freeze="embeddings"), "H100"),
        (Recipe("t5-3b-tiny", seq_len=64, optimizer="lion_8bit"), "T4"),
    ),
    ids=str,
)
def test_updates_alone_are_those_of_a_training(recipe, gpu, monkeypatch):
    card, recipe = find_gpu(gpu), recipe.but(model=models.with_layers(recipe.model, 5))
    _, found = next(structures(recipe, card))
    passes, updates = record(recipe, card, found)
    fewer, alone = record(recipe, card, found, updates_alone=True)
    assert len(fewer.half.log.order) < len(passes.half.log.order) / 4
    sizes, depth = found.sizes(recipe) | card.symbols, Depth(5, 1)
    logs = [Trace(passes.half, one.half).at(sizes, depth) for one in (updates, alone)]
    assert are_alike(*logs) and logs[0].work == logs[1].work

    def without_one(recipe, simulated):
        training = built(recipe, simulated)
        next(one for one in training.model.parameters() if one.requires_grad).requires_grad_(False)
        simulated.steps.begin_update()
        training.update()
        return training

    monkeypatch.setattr("memlab.predict.trace_recorder.two_updates", without_one)
    whole, _ = record(recipe, card, found, updates_alone=True)
    assert len(whole.half.log.order) == len(passes.half.log.order)


@pytest.mark.parametrize("name", [n for n in models.MODELS if not n.endswith("-tiny")])
def test_no_model_has_changed_code_by_itself(name):
    with torch.device("meta"):
        models.build(name)
    assert not has_changed_code(models.config(name).model_type)


@pytest.mark.parametrize("most", [2, 3])
def test_two_halves_are_there_however_few_are_kept(monkeypatch, most):
    monkeypatch.setattr("memlab.predict.traces.MAX_CACHED_PHASES", most)
    traces, card = Traces(), find_gpu("T4")
    # With three kept, the last one's update is the oldest when its passes come in.
    asked = [("sgd", 32), ("adamw_torch", 33), ("sgd", 34), ("sgd", 32), ("adamw_torch", 34)]
    for optimizer, length in asked:
        assert traces.of(TINY.but(optimizer=optimizer, seq_len=length), card)


# ---------------------------------------------------------------------- kept on disk


def test_a_trace_is_kept_for_the_next_process(tmp_path, monkeypatch):
    recipe, card = Recipe("gpt2-medium", seq_len=128, attention="sdpa"), find_gpu("T4")
    first = Traces(Store(tmp_path)).log(recipe.but(batch_size=2), card)
    monkeypatch.setattr("memlab.predict.trace_recorder.record", None)
    again = Traces(Store(tmp_path)).log(recipe.but(batch_size=4), card)
    monkeypatch.undo()
    assert are_alike(again, Traces().log(recipe.but(batch_size=4), card))
    assert again.work and first.work
    assert len(list(tmp_path.iterdir())) == 2  # the passes and the updates


# Of the second, whose layers repeat in sixes, three shallow models have more layers than it has.
@pytest.mark.parametrize("model", [models.with_layers("llama-3-8b-tiny", 14), "gemma-3-270m"])
def test_a_run_of_what_has_no_trace_is_kept_too(tmp_path, monkeypatch, model):
    recipe, card = LLAMA.but(model=model, loss="chunked", accumulation=3), find_gpu("T4")
    first = Traces(Store(tmp_path)).log(recipe, card)
    monkeypatch.setattr("memlab.predict.trace_recorder.run_halves", None)
    again = Traces(Store(tmp_path)).log(recipe, card)
    monkeypatch.undo()
    for other in (again, run_log(recipe, card)):
        assert are_alike(first, other) and first.work == other.work
        assert first.assumptions == other.assumptions
    assert not are_alike(first, Traces(Store(tmp_path)).log(recipe.but(seq_len=48), card))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "damage",
    (
        b"",
        b"half a fi",
        gzip.compress(b"[1, 2, 3]" * 9)[:10] + b"\xff" * 20,
        gzip.compress(b'{"sizes": 1}'),
    ),
    ids=("empty", "cut short", "spoilt within", "other content"),
)
def test_a_damaged_file_is_made_anew(tmp_path, damage):
    recipe, card = TINY, find_gpu("T4")
    log = Traces(Store(tmp_path)).log(recipe, card)
    for file in tmp_path.iterdir():
        file.write_bytes(damage)
    assert are_alike(Traces(Store(tmp_path)).log(recipe, card), log)
    assert all(file.read_bytes() != damage for file in tmp_path.iterdir())


def test_traces_of_other_releases_are_not_taken(tmp_path, monkeypatch):
    store, known = Store(tmp_path), {}
    store.write("a way", None)
    monkeypatch.setattr("memlab.predict.store._surroundings", lambda: "torch 2.99")
    store.read_into(known, "a way")
    assert not known


def test_the_oldest_traces_make_room(tmp_path, monkeypatch):
    store, known = Store(tmp_path), {}
    store.write("old", None)
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, 0))
    monkeypatch.setattr("memlab.predict.store.LARGEST", file.stat().st_size)
    store.write("new", None)
    for key in ("old", "new"):
        store.read_into(known, key)
    assert known == {"new": None}


def test_a_folder_that_cannot_be_written_is_no_matter(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file")
    store.write("a way", None)
    store.read_into({}, "a way")
