"""Code written for CUDA inside a simulated GPU: what it is told, and what is refused."""

import pkgutil

import pytest
import torch
from helpers import allocated, refused, run_python
from transformers import AutoModelForCausalLM
from transformers.utils import is_torch_cuda_available

from memlab import MiB, Recipe, SimulatedGPU, models
from memlab.card.cuda_api import NOT_SIMULATED
from memlab.card.placement import NotSimulated
from memlab.gpus import GPUS
from memlab.workloads.training import Training


@pytest.mark.parametrize("name", ["T4", "H100"])
def test_the_card_says_what_it_is(name):
    with SimulatedGPU(name):
        properties = torch.cuda.get_device_properties(0)
        assert properties.total_memory == GPUS[name].total_memory
        assert (properties.major, properties.minor) == GPUS[name].capability
        assert torch.cuda.get_device_name() == name
        assert torch.cuda.get_device_capability("cuda") == GPUS[name].capability
        native = "bfloat16" in GPUS[name].native_dtypes
        assert torch.cuda.is_bf16_supported(including_emulation=False) is native
        assert torch.cuda.is_bf16_supported() is True


@pytest.mark.parametrize(
    ("name", "of_processor", "of_block", "threads"),
    [
        ("V100", 96, 96, 2048),
        ("T4", 64, 64, 1024),
        ("RTX-3090", 100, 99, 1536),
        ("L4", 100, 99, 1536),
        ("H100", 228, 227, 2048),
        ("P100", 64, 48, 2048),
        ("GTX-1080-Ti", 96, 48, 2048),
        ("RTX-5090", 100, 99, 1536),
    ],
)
def test_a_multiprocessor_is_that_of_its_class(name, of_processor, of_block, threads):
    """CUDA C++ Programming Guide, technical specifications per compute capability."""
    with SimulatedGPU(name):
        found = torch.cuda.get_device_properties()
    assert found.shared_memory_per_multiprocessor == of_processor * 1024
    assert found.shared_memory_per_block_optin == of_block * 1024
    assert found.max_threads_per_multi_processor == threads


def test_there_is_one_card_inside_and_none_after():
    before = torch.cuda.is_available()
    with SimulatedGPU("T4"):
        assert torch.cuda.is_available() and is_torch_cuda_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        torch.cuda.set_device("cuda:0")
        torch.accelerator.set_device_index(0)
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.accelerator.device_count() == 1
        assert torch.accelerator.current_device_index() == 0
        torch.accelerator.synchronize()
    assert torch.cuda.is_available() == is_torch_cuda_available() == before


def test_a_card_without_a_limit_has_no_size(gpu):
    assert torch.cuda.get_device_capability() == (8, 0)
    with refused("has none"):
        print(torch.cuda.get_device_properties().total_memory)


def test_memory_statistics_have_pytorchs_names(t4):
    training = Training(Recipe(model="bert-base-tiny", seq_len=32), "cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        training.step()
    stats = torch.cuda.memory_stats()
    footprint = t4.footprint
    assert stats["allocated_bytes.all.peak"] == footprint.peak_allocated
    assert stats["reserved_bytes.all.peak"] == footprint.peak_reserved
    assert stats["allocated_bytes.all.current"] == allocated()
    assert stats["active_bytes.all.current"] == allocated()
    assert torch.accelerator.max_memory_allocated() == torch.cuda.max_memory_allocated()
    assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
    taken, freed = (stats[f"allocated_bytes.all.{how}"] for how in ("allocated", "freed"))
    assert taken - freed == stats["allocated_bytes.all.current"]
    assert stats["num_ooms"] == stats["num_alloc_retries"] == 0
    assert "segment.large_pool.peak" in stats and "inactive_split_bytes.all.peak" in stats
    summary = torch.cuda.memory_summary()
    assert f"{allocated() // 1024:6d} KiB" in summary
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.freed"] == 0


def test_out_of_memory_is_counted(t4):
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    cached = torch.zeros(2**31, device="cuda")
    del cached
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.zeros(2**32, device="cuda")
    stats = torch.cuda.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
    assert torch.cuda.memory_reserved() == 0  # the cache was emptied first


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: torch.zeros(1, device="cuda:1"), "cuda:1"),
        (lambda: torch.zeros(1).to(1), "cuda:1"),
        (lambda: torch.zeros(1, device="cuda").to("mps"), "mps"),
        (lambda: torch.zeros(1, device="xla"), "xla"),
        (lambda: torch.cuda.set_device(1), "cuda:1"),
        (lambda: torch.cuda.device(1).__enter__(), "cuda:1"),
        (lambda: torch.Generator("cuda:1"), "cuda:1"),
        (lambda: torch.compile(dynamic=True)(lambda x: x)(1), "torch.compile"),
        (lambda: torch.cuda.caching_allocator_alloc(2**20), "caching_allocator_alloc"),
        (lambda: torch.distributed.init_process_group("nccl"), "init_process_group"),
        (lambda: torch.from_dlpack(torch.ones(3, device="cuda")), "DLPack"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(t4, use, name):
    with refused(name):
        use()


@pytest.mark.parametrize("name", NOT_SIMULATED)
def test_each_name_of_the_table_is_refused(t4, name):
    with refused(f"{name} is not simulated", kind=NotSimulated):
        pkgutil.resolve_name(name)()


@pytest.mark.parametrize("inline", [True, False])
def test_a_cuda_extension_is_refused_before_it_is_built(inline, tmp_path):
    from torch.utils import cpp_extension

    built = {"name": "of_mine", "build_directory": str(tmp_path)}
    with SimulatedGPU("T4"):
        with refused("the CUDA extension of_mine is not simulated"):
            if inline:
                cpp_extension.load_inline(
                    cpp_sources="", cuda_sources="__global__ void f() {}", **built
                )
            else:
                cpp_extension.load(sources=[str(tmp_path / "kernel.cu")], **built)
    assert not list(tmp_path.glob("*.o"))


def test_what_a_plain_loop_asks_for_goes_on():
    with SimulatedGPU("T4"):
        torch.cuda.manual_seed_all(0)
        torch.manual_seed(0)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.cuda.device(0), torch.cuda.stream(torch.cuda.current_stream()):
            x = torch.randn(3, generator=torch.Generator("cuda"), device=0)
            x.record_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        with torch.device("cuda"):
            layer = torch.nn.Linear(3, 3)
        torch.set_default_device("cuda")
        y = torch.ones(3)
        torch.set_default_device(None)
        assert layer.to(0)(x + y).shape == (3,)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")
    assert isinstance(torch.Generator(), torch.Generator)


def test_streams_of_any_accelerator_are_the_cards(t4):
    usual, other = torch.cuda.current_stream(), torch.Stream(device="cuda")
    with other, torch.cuda.stream(torch.Stream()):
        assert torch.accelerator.current_stream() not in (usual, other)
    torch.accelerator.set_stream(other)
    assert torch.cuda.current_stream() is other is not usual
    assert isinstance(torch.cuda.Stream(), torch.Stream)
    event = other.record_event(torch.Event(device="cuda"))
    usual.wait_event(event)
    torch.cuda.set_sync_debug_mode("warn")


def test_profilers_go_on_without_the_cards_times(t4):
    from torch.profiler import ProfilerActivity, profile, schedule

    def step():
        layer = torch.nn.Linear(64, 64).cuda()
        layer(torch.ones(4, 64, device="cuda")).sum().backward()

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        step()
    held = allocated()
    assert torch.cuda.cudart().cudaMemGetInfo(0) == torch.cuda.mem_get_info()
    assert t4.footprint.assumptions == ()
    with profile(
        activities=both,
        schedule=schedule(wait=1, warmup=1, active=1),
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
    ) as profiler:
        for _ in range(3):
            step()
            profiler.step()
    assert "aten::linear" in profiler.key_averages().table(sort_by="cuda_time_total")
    assert allocated() == held
    times, memory = t4.footprint.assumptions
    assert "no times of the card" in times and "profile_memory is ignored" in memory


def test_a_step_timed_by_events_has_a_stand_in_that_is_said(t4):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(), end.record()
    assert t4.footprint.assumptions == ()
    assert start.elapsed_time(end) == 1.0
    assert ["elapsed_time" in said for said in t4.footprint.assumptions] == [True]


def test_a_fraction_of_the_card_limits_what_the_process_takes(t4):
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *said: seen.append(said))
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    torch.cuda.set_per_process_memory_fraction(0.25)
    free, total = torch.cuda.mem_get_info()
    torch.empty(total // 5, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError, match=r"GiB allowed; Of the allocated"):
        torch.empty(total // 3, dtype=torch.uint8, device="cuda")
    assert [(device, size >= total // 3) for device, size, *_ in seen] == [(0, True)]
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(total // 3, dtype=torch.uint8, device="cuda")
    assert torch.cuda.device_memory_used() == total - torch.cuda.mem_get_info()[0]


def test_what_else_a_build_for_cuda_answers(t4):
    assert torch.cuda.get_allocator_backend() == "native"
    assert torch.cuda.host_memory_stats() == {}
    torch.cuda.reset_peak_host_memory_stats()
    torch.compiler.cudagraph_mark_step_begin()
    torch.nn.Linear(4, 4).cuda().share_memory()
    waves = torch.randn(2, 4000, device="cuda")
    window = torch.hann_window(400, device="cuda")
    spectrum = torch.stft(waves, 400, window=window, return_complex=True)
    assert torch.istft(spectrum, 400, window=window).shape == waves.shape


def test_weights_that_are_tied_have_one_address_and_others_have_their_own(t4):
    """Libraries tell by it, the Trainer's count of what an embedding manager skips among them."""
    one, two = torch.nn.Linear(4, 4, device="cuda"), torch.nn.Linear(4, 4, device="cuda")
    two.bias = one.bias
    assert one.bias.data_ptr() == two.bias.detach().data_ptr() != 0
    assert one.weight.data_ptr() != two.weight.data_ptr()
    assert one.weight[1].data_ptr() == one.weight.data_ptr() + 16


def test_data_made_outside_takes_room_when_it_is_moved():
    data = torch.zeros(1000, MiB // 4)  # 1000 MiB on the host
    with SimulatedGPU("T4"):
        batch = data[:2].pin_memory().to("cuda", non_blocking=True)
        assert allocated() == 2 * MiB
        assert (batch.float() + 1).shape == (2, MiB // 4)
        data[0].cuda()
        moved = data[0].to(batch.device, torch.float16)
        assert (moved.dtype, moved.untyped_storage().nbytes()) == (torch.float16, MiB // 2)
        assert torch.cuda.max_memory_allocated() < 8 * MiB


@pytest.mark.parametrize("place", [{"device_map": "cuda"}, {"device_map": {"": 0}}, {}])
def test_a_checkpoint_is_loaded_onto_the_card(place, tmp_path):
    model = models.build("gpt2-tiny")
    model.save_pretrained(tmp_path)
    stored = sum(weight.numel() for weight in model.parameters())
    with SimulatedGPU("T4") as gpu:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16, **place)
        model.to("cuda")
        assert 2 * stored <= allocated() < 2.01 * stored + MiB
        model(input_ids=torch.ones(1, 8, dtype=torch.long, device="cuda"))
        assert gpu.footprint.timeline.levels["parameters"][-1] == 2 * stored
        assert model.lm_head.weight is model.transformer.wte.weight  # tied, as they were saved
        model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").stat().st_size > 0


@pytest.mark.slow
def test_accelerate_imported_inside_looks_for_a_device_again_outside():
    code = (
        "import torch, memlab\n"
        "with memlab.SimulatedGPU('T4'):\n"
        "    from accelerate import Accelerator\n"
        "    assert Accelerator().device.type == 'cuda'\n"
        "assert (Accelerator().device.type == 'cuda') == torch.cuda.is_available()\n"
    )
    run_python(code)


def test_torch_compile_tells_apart_what_selects_a_card(gpu):
    """It keeps a handler for each function, and refuses a second one for the same."""
    assert torch.cuda._exchange_device is not torch.cuda._maybe_exchange_device
