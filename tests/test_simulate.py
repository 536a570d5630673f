"""The simulated GPU: full-size figures, the reader's own loops, and running out of memory."""

import contextlib
import re
import subprocess
import sys

import pytest
import torch
from transformers import BertForSequenceClassification, DataCollatorWithPadding

from memlab import Recipe, SimulatedGPU, measure, simulate
from memlab.book.corpora import tokenizer
from memlab.models import build, config
from memlab.training import Training

MiB = 2**20
BERT = Recipe(model="bert-large", batch_size=4, seq_len=512, optimizer="adamw_torch_loop")


def test_bert_large_at_full_size():
    footprint = simulate(BERT)
    assert footprint.peak_tensors / MiB == pytest.approx(10_528, rel=0.005)
    assert footprint.breakdown["parameters"] / MiB == pytest.approx(1278.5, abs=0.05)
    assert footprint.breakdown["optimizer_states"] / MiB == pytest.approx(2557, abs=0.2)
    assert footprint.parameters == footprint.trainable_parameters == 335_143_938
    assert footprint.peak_phase == "backward"
    assert sum(footprint.breakdown.values()) == footprint.peak_allocated
    assert footprint.peak_allocated <= footprint.peak_reserved


@pytest.mark.parametrize(
    ("changes", "tensors", "phase"),
    [
        ({"batch_size": 1}, 5_531, "backward"),
        ({"batch_size": 1, "accumulation": 4}, 6_798, "backward"),
        ({"batch_size": 1, "accumulation": 4, "checkpointing": True}, 5_352, "optimizer step"),
        # PyTorch's own choice on CUDA, foreach, holds a copy of all gradients in the step.
        ({"batch_size": 1, "optimizer": "adamw_torch"}, 6_393, "optimizer step"),
    ],
)
def test_bert_large_with_less_in_flight(changes, tensors, phase):
    footprint = simulate(BERT.but(**changes))
    assert footprint.peak_tensors / MiB == pytest.approx(tensors, rel=0.005)
    assert footprint.peak_phase == phase


def test_every_layer_keeps_a_padding_mask_of_its_own():
    recipe = Recipe(model="bert-base", batch_size=16, seq_len=256, attention="sdpa")
    full, padded = simulate(recipe), simulate(recipe.but(padded=True))
    more = padded.breakdown["activations"] - full.breakdown["activations"]
    masks = 12 * 16 * 256 * 256 * 4
    assert more == pytest.approx(masks, rel=0.01)


def test_a_collated_batch_takes_what_its_recipe_says():
    """DataCollatorWithPadding's batch in the reader's own loop, against a recipe of its shape."""
    words = tokenizer(["one two three four five six"], vocab_size=512)
    texts = [dict(input_ids=[7] * n, labels=n % 2) for n in (77, 30, 12, 50)]
    recipe = Recipe("bert-base-tiny", batch_size=4, seq_len=77, padded=True, attention="sdpa")
    with SimulatedGPU() as gpu:
        model = build(recipe.model, attention="sdpa")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = DataCollatorWithPadding(words)(texts).to("cuda")
        for _ in range(2):
            gpu.reset_peak()
            loss = model(**batch).loss
            loss.backward()
            loss = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
    assert gpu.footprint.peak_allocated == simulate(recipe).peak_allocated


ALONE = """
import memlab
recipe = memlab.Recipe(model="gpt2-tiny", seq_len=16, lora_rank=2)
assert memlab.simulate(recipe) == memlab.simulate(recipe)
memlab.simulate(memlab.Recipe(model="bert-large", batch_size=4))
print(open("/proc/self/status").read())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_new_process_says_the_same_twice_and_takes_little_memory():
    """peft imports bitsandbytes, which makes tables: on the card, if it came too late."""
    run = [sys.executable, "-c", ALONE]
    out = subprocess.run(run, capture_output=True, text=True, check=True)
    # Not ru_maxrss, which a process takes over from the one that started it.
    highest = int(re.search(r"VmHWM:\s+(\d+) kB", out.stdout)[1]) * 1024
    assert highest < 2**30


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_more_micro_batches_hold_what_two_hold(checkpointing):
    tiny = Recipe(model="bert-large-tiny", batch_size=2, seq_len=64, checkpointing=checkpointing)
    with SimulatedGPU() as gpu:
        training = Training(tiny.but(accumulation=5), gpu.device)
        gpu.watch(training.model, inputs=training.inputs)
        training.step()
        gpu.reset_peak()
        training.step()
        whole = gpu.footprint
    short = simulate(tiny.but(accumulation=5))
    losses = 3 * 512  # the loop keeps each loss until the end of the step, a block each
    assert short.peak_allocated + losses == whole.peak_allocated
    assert short.peak_reserved == whole.peak_reserved


def test_states_and_gradients_equal_a_real_run():
    recipe = Recipe(model="gpt2-tiny", batch_size=2, seq_len=64, optimizer="adamw_torch_fused")
    simulated, real = simulate(recipe), measure(recipe, "cpu", steps=1)
    for category in ("parameters", "optimizer_states"):
        assert simulated.breakdown[category] == real.footprint.breakdown[category]


@pytest.mark.parametrize(
    ("optimizer", "bytes_a_weight"),
    [("adamw_8bit", 2), ("lion_8bit", 1), ("paged_adamw_8bit", 0), ("adafactor", 0), ("sgd", 4)],
)
def test_states_of_the_lean_optimizers(optimizer, bytes_a_weight):
    recipe = Recipe(model="bert-base", seq_len=64, optimizer=optimizer)
    footprint = simulate(recipe)
    embeddings = (30522 + 512 + 2) * 768
    expected = bytes_a_weight * footprint.parameters
    if "8bit" in optimizer:  # the embeddings' states stay in 32 bit, except where they are paged
        expected += (4 - 1) * bytes_a_weight * embeddings
        expected += bytes_a_weight * (footprint.parameters - embeddings) * 4 / 256  # constants
    slack = 0.05 * footprint.parameters  # rows and columns of Adafactor, small tensors in 32 bit
    assert footprint.breakdown["optimizer_states"] == pytest.approx(expected, abs=slack)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "lion_8bit", "adafactor"])
def test_states_of_the_lean_optimizers_equal_a_real_run(optimizer):
    recipe = Recipe(model="bert-base-tiny", batch_size=2, seq_len=64, optimizer=optimizer)
    simulated, real = simulate(recipe), measure(recipe, "cpu", steps=1)
    for category in ("parameters", "optimizer_states"):
        there = real.footprint.breakdown[category]
        assert simulated.breakdown[category] == pytest.approx(there, abs=4096)


def reader_loop(batch_size, steps, halve=False):
    """A loop as a reader writes it for CUDA."""
    model = BertForSequenceClassification._from_config(
        config("bert-large"), attn_implementation="eager"
    )
    model.to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters())
    done, messages = 0, []
    while done < steps:
        try:
            tokens = torch.randint(0, 30000, (batch_size, 512), device="cuda")
            labels = torch.zeros(batch_size, dtype=torch.long).cuda()
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        except torch.OutOfMemoryError as error:
            messages.append(str(error))
            if not halve:
                raise
            batch_size //= 2
            optimizer.zero_grad()
    return batch_size, messages


def test_out_of_memory_in_pytorchs_words_and_on_with_half_the_batch():
    with SimulatedGPU("T4") as gpu:
        batch_size, messages = reader_loop(8, steps=2, halve=True)
        capacity = torch.cuda.mem_get_info()[1]
    assert batch_size == 4
    assert len(messages) == 1
    size = r"([\d.]+) ([MG]iB)"
    found = re.fullmatch(
        rf"CUDA out of memory\. Tried to allocate {size}\. GPU 0 has a total capacity of {size} "
        rf"of which {size} is free\. Including non-PyTorch memory, this process has {size} memory "
        rf"in use\. Of the allocated memory {size} is allocated by PyTorch, and {size} is "
        r"reserved by PyTorch but unallocated\. If reserved but unallocated memory is large try "
        r"setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation\.  See "
        r"documentation for Memory Management  \(https://.*#environment-variables\)",
        messages[0],
    )
    values = [
        float(number) * {"MiB": 1, "GiB": 1024}[unit]
        for number, unit in zip(found.groups()[::2], found.groups()[1::2], strict=True)
    ]
    wanted, total, free, used, allocated, cached = values
    assert total == pytest.approx(capacity / MiB, rel=0.001)
    assert free < wanted
    assert free + used == pytest.approx(total, rel=0.001)
    context = gpu.gpu.context / MiB
    assert allocated + cached + context == pytest.approx(used, rel=0.002)


def test_the_recipe_runs_out_where_the_loop_does():
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        simulate(BERT.but(batch_size=8), gpu="T4")
    assert simulate(BERT, gpu="T4").device_used < 14912 * MiB


def test_code_written_for_cuda_runs_unchanged():
    with SimulatedGPU("T4"):
        model = torch.nn.Linear(256, 256).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        x = torch.randn(8, 256, device=torch.device("cuda:0"))
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda"):
            out = model(x)
            loss = out.float().pow(2).mean()
        assert out.dtype == torch.float16
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert loss.item() == 1.0
        assert optimizer.state[model.weight]["exp_avg"].shape == (256, 256)
        assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
        assert torch.cuda.memory_reserved() <= torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        assert 0 < free < total


def test_the_default_step_is_the_one_of_cuda():
    def peak(**choice):
        with SimulatedGPU() as gpu:
            weights = [torch.nn.Parameter(torch.zeros(256, 1024)) for _ in range(8)]
            optimizer = torch.optim.AdamW(weights, **choice)
            for _ in range(2):
                gpu.reset_peak()
                sum(weight.sum() for weight in weights).backward()
                optimizer.step()
                optimizer.zero_grad()
            return gpu.footprint.peak_tensors

    assert peak() == peak(foreach=True) > peak(foreach=False)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_what_autograd_saves_on_the_cpu_leaves_the_card_until_it_is_wanted(pin_memory):
    peaks = []
    for offload in (False, True):
        with SimulatedGPU() as gpu:
            x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
            gpu.reset_peak()
            context = torch.autograd.graph.save_on_cpu(pin_memory=pin_memory)
            with context if offload else contextlib.nullcontext():
                y = x
                for _ in range(8):
                    y = y.tanh()  # each keeps its output
            last = gpu.footprint.timeline.totals()[-1]
            y.sum().backward()
        peaks.append((last, gpu.footprint.peak_allocated))
    size = 4 * 2**20
    assert peaks[0][0] - peaks[1][0] == 7 * size  # y itself is still held
    assert peaks[1][1] < peaks[0][1] - 4 * size


def test_a_pinned_copy_of_a_view_in_another_order_needs_memory_on_the_card_for_a_moment():
    for pin_memory, more in ((False, 0), (True, 1)):
        with SimulatedGPU() as gpu:
            x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
            turned = x.t()
            gpu.reset_peak()
            with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
                y = turned.tanh()
            peak = gpu.footprint.peak_allocated
            del y
        assert peak == (2 + more) * 4 * 2**20


def test_step_counters_live_on_the_host_unless_the_step_is_fused():
    loop = simulate(Recipe(model="bert-large-tiny", seq_len=32, optimizer="adamw_torch_loop"))
    fused = simulate(Recipe(model="bert-large-tiny", seq_len=32, optimizer="adamw_torch_fused"))
    assert loop.breakdown["optimizer_states"] == 8 * loop.parameters
    assert fused.breakdown["optimizer_states"] > 8 * fused.parameters


def test_workspaces_are_apart_and_depend_on_the_card():
    recipe = Recipe(model="bert-large-tiny", seq_len=32)
    t4, h200 = simulate(recipe, "T4"), simulate(recipe, "H200")
    assert t4.breakdown["workspaces"] == 2 * 8_519_680 + 1 * MiB
    assert h200.breakdown["workspaces"] == 2 * 32 * MiB + 1 * MiB


@pytest.mark.parametrize(
    ("gpu", "allowed"), [("T5", "T4"), (0, "above 0"), (-1, "above 0"), (True, "T4")]
)
def test_unknown_cards_are_refused(gpu, allowed):
    with pytest.raises(ValueError, match=allowed) as error:
        SimulatedGPU(gpu)
    assert "\n" not in str(error.value)


def test_a_precision_that_the_card_lacks_is_refused():
    with pytest.raises(ValueError, match="T4 has no native bfloat16"):
        simulate(Recipe(precision="bf16"), gpu="T4")


def test_everything_is_put_back_after_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        with SimulatedGPU(10 * MiB):
            torch.zeros(100 * MiB)
    assert torch.zeros(3).sum().item() == 0
    assert torch.autocast("cpu").device == "cpu"
    assert torch.cuda.memory_allocated() == 0
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device="cuda")


def test_the_footprint_stays_as_it_was_at_the_end():
    with SimulatedGPU() as gpu:
        x = torch.zeros(MiB, device="cuda")
    before = gpu.footprint
    del x
    assert gpu.footprint == before and before.breakdown["temporary"] == 4 * MiB


def test_one_card_at_a_time():
    with SimulatedGPU("T4"):
        with pytest.raises(ValueError, match="entered already"):
            simulate(Recipe(model="bert-base-tiny", seq_len=16))
    assert simulate(Recipe(model="bert-base-tiny", seq_len=16)).peak_allocated > 0


def test_experts_in_fp32_are_refused_by_name():
    with pytest.raises(ValueError, match="mixture of experts is simulated in bf16 only"):
        simulate(Recipe(model="mixtral-8x7b-tiny", seq_len=16))
    assert simulate(Recipe(model="mixtral-8x7b-tiny", seq_len=16, precision="bf16"))


def test_a_copy_on_the_host_keeps_nothing_on_the_card():
    with SimulatedGPU():
        for to_host in (torch.Tensor.cpu, lambda x: x.to("cpu"), lambda x: x.detach().cpu() * 2):
            tensor = torch.zeros(MiB, device="cuda")
            copy = to_host(tensor)
            assert torch.cuda.memory_allocated() == 4 * MiB
            del tensor
            assert copy.shape == (MiB,)
            assert torch.cuda.memory_allocated() == 0
            back = copy.to("cuda")
            assert torch.cuda.memory_allocated() == 4 * MiB
            del back


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {"input_ids": torch.full((512,), i)}


@pytest.mark.parametrize("pinned", [False, True])
def test_workers_of_a_data_loader_make_tensors_on_the_host(pinned):
    with SimulatedGPU():
        loader = torch.utils.data.DataLoader(Rows(), 2, num_workers=1, pin_memory=pinned)
        for batch in loader:
            tokens = batch["input_ids"]
            assert torch.cuda.memory_allocated() == 0
            tokens = tokens.to("cuda", non_blocking=True)
            assert tokens.shape == (2, 512)
            assert torch.cuda.memory_allocated() == 2 * 512 * 8
            del tokens


def test_packed_sequences_need_a_mask_where_their_positions_are_known():
    tokens = torch.zeros(1, 64, dtype=torch.long)
    one, two = torch.arange(64)[None], torch.cat([torch.arange(32), torch.arange(32)])[None]

    def operations(**positions):
        with SimulatedGPU() as gpu:
            model = build("llama-3-8b-tiny", attention="sdpa").to("cuda")
            batch = {"input_ids": tokens} | positions
            model(**{name: values.to("cuda") for name, values in batch.items()}, use_cache=False)
        return {life.operation for life in gpu.footprint.timeline.lives}

    alone, packed = operations(position_ids=one), operations(position_ids=two)
    assert "aten.cumsum" in packed and "aten.cumsum" not in alone
