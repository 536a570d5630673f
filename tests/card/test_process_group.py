"""One of several ranks on the simulated card: DDP, FSDP2, and what is put back."""

import math
import os

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint_files
from helpers import allocated, most, refused
from torch.distributed._functional_collectives import all_reduce_coalesced
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import Trainer

from memlab import MiB, Recipe, SimulatedGPU, find_gpu, simulate
from memlab.card.links import link_rate
from memlab.card.placement import NotSimulated
from memlab.card.step_time import EXPECTED
from memlab.models import build, config
from memlab.trace.patches import MISSING, replacements

WIDE, LAYERS = 1024, 4
LAYER = WIDE * WIDE * 4  # bytes in fp32


@pytest.fixture
def gpu():
    """The first of four ranks, inside which a test runs."""
    with SimulatedGPU("H100", ranks=4) as card:
        yield card


def model():
    return torch.nn.Sequential(*[torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])


def two_steps(gpu, net, optimizer, rows=8, dtype=None):
    """The footprint of the second of two steps."""
    for _ in range(2):
        gpu.reset_peak()
        net(torch.randn(rows, WIDE, device="cuda", dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return gpu.footprint


def assert_holds_a_quarter(footprint):
    share = LAYERS * LAYER // 4
    assert most(footprint, "parameters") == most(footprint, "gradients") == share
    assert most(footprint, "optimizer_states") == 2 * share


def start(backend="nccl"):
    dist.init_process_group(backend)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
    torch.manual_seed(1)  # of every card of the machine


@pytest.mark.skipif(
    hasattr(FSDPParam, "to_accumulated_grad_if_needed"),
    reason="before PyTorch 2.15 fully_shard itself raises an AttributeError",
)
def test_under_accumulation_a_layer_may_stay_unused():
    class First(torch.nn.Sequential):
        def forward(self, x):
            return self[0](x)

    with SimulatedGPU("A100-80GB", ranks=4) as gpu:
        start()
        model = First(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
        for layer in (*model, model):
            fully_shard(layer)
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(torch.randn(2, 64, device="cuda")).sum().backward()
    assert gpu.footprint.peak_allocated


def test_what_no_table_knows_counts_as_sent_whole():
    """Of four ranks: an all-reduce sends 1.5 of its bytes, a reduction to one rank all."""
    sent = {}
    for name, collective in (
        ("all_reduce", dist.all_reduce),
        ("reduce", lambda x: dist.reduce(x, 0)),
        ("coalesced", lambda x: all_reduce_coalesced([x], "sum", dist.group.WORLD)),
        ("barrier", lambda x: dist.barrier()),
    ):
        with SimulatedGPU("A100-80GB", ranks=4) as gpu:
            start()
            collective(torch.zeros(1000, device="cuda"))
            work = gpu.work.of_step
        sent[name] = sum(one.sent * times for one, times in work.items())
    assert sent == {"all_reduce": 6000, "reduce": 4000, "coalesced": 4000, "barrier": 0}


# ---------------------------------------------------------------------- what a rank holds


@pytest.mark.parametrize(("views", "static"), [(False, False), (True, False), (True, True)])
def test_ddp_keeps_its_buckets_beside_the_gradients_unless_these_are_views(gpu, views, static):
    start()
    settings = {"gradient_as_bucket_view": views, "static_graph": static}
    net = DistributedDataParallel(model().cuda(), **settings)
    footprint = two_steps(gpu, net, torch.optim.SGD(net.parameters(), foreach=False))
    assert most(footprint, "parameters") == LAYERS * LAYER
    # A view is filled from a gradient that is made first and dropped at once.
    assert most(footprint, "gradients") == (LAYERS + 1 if views else 2 * LAYERS) * LAYER
    if not views:
        made = {life.nbytes for life in footprint.timeline.lives if life.operation == "aten.empty"}
        # A bucket has up to 25 MiB, and the first 1 MiB, which the last layer's gradient exceeds.
        # Before the first step all were one bucket.
        assert {n for n in made if n >= LAYER} == {LAYER, (LAYERS - 1) * LAYER, LAYERS * LAYER}


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_statistics_of_all_ranks_take_what_those_of_one_take(dtype):
    def kept(synchronized):
        with SimulatedGPU("T4", ranks=4):
            torch.distributed.init_process_group("nccl")
            layer = torch.nn.BatchNorm2d(8)
            model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), layer, torch.nn.ReLU())
            if synchronized:
                model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
            model.to("cuda", memory_format=torch.channels_last)
            pictures = torch.randn(4, 3, 64, 64, device="cuda", requires_grad=True)
            with torch.autocast("cuda", dtype, enabled=dtype == torch.half):
                out = model(pictures.to(memory_format=torch.channels_last))
            held = allocated()
            out.sum().backward()
            assert out.is_contiguous(memory_format=torch.channels_last)
            assert pictures.grad.shape == pictures.shape and model[1].weight.grad.shape == (8,)
            return held, torch.cuda.max_memory_allocated()

    for one, all_ranks in zip(kept(False), kept(True), strict=True):
        assert 0 <= all_ranks - one <= 4096  # the count of values; sums


@pytest.mark.parametrize(("after_forward", "half"), [(True, torch.bfloat16), (False, None)])
def test_fsdp_keeps_a_share_and_gathers_a_layer_at_a_time(gpu, after_forward, half):
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half and torch.float32)
    net = model()
    for layer in net:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=after_forward)
    fully_shard(net, mp_policy=policy)
    net[0].set_modules_to_forward_prefetch([net[1]])
    footprint = two_steps(gpu, net, torch.optim.AdamW(net.parameters()))
    assert_holds_a_quarter(footprint)
    gathered = [x for x in footprint.timeline.lives if x.operation == "aten.resize_"]
    whole = LAYER if half is None else LAYER // 2
    assert {life.nbytes for life in gathered} == {whole}
    assert {life.category for life in gathered} == {"temporary"}
    assert len(gathered) == (2 if after_forward else 1) * LAYERS
    assert all(life.died is not None for life in gathered)


def test_shards_of_what_does_not_divide_are_padded(gpu):
    net = torch.nn.Linear(16, 1001, bias=False)
    fully_shard(net)
    assert net.weight.to_local().shape == (251, 16)
    gpu.reset_peak()
    assert net.weight.shape == (1001, 16) and net.weight.is_cuda
    assert allocated() == 32 * 512  # 251 rows of 16 numbers, rounded up


PLAN = {"0": ColwiseParallel(), "1": RowwiseParallel()}
PLAN |= {"2": ColwiseParallel(), "3": RowwiseParallel()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_tensor_parallel_layers_are_split_with_their_gradients_and_states(gpu, replicas):
    """Alone, and inside fully_shard, which splits each part again."""
    names = "copies", "parts"
    mesh = dist.init_device_mesh("cuda", (replicas, 4 // replicas), mesh_dim_names=names)
    net = parallelize_module(model().cuda(), mesh["parts"], PLAN)
    if replicas > 1:
        for layer in [*net, net]:
            fully_shard(layer, mesh=mesh["copies"])
    footprint = two_steps(gpu, net, torch.optim.AdamW(net.parameters()))
    assert_holds_a_quarter(footprint)


def test_attention_of_split_heads_takes_the_kernel_of_whole_ones():
    """DTensors, as `ColwiseParallel(use_local_output=False)` gives them, keep what theirs keep."""

    def kept(split):
        with SimulatedGPU("A100-80", ranks=2):
            mesh = dist.init_device_mesh("cuda", (2,))
            heads = [torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in "qkv"]
            if split:
                heads = [DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in heads]
            out = scaled_dot_product_attention(*heads, is_causal=True)
            held = allocated()
            return held, out.to_local().stride() if split else out.stride()

    assert kept(split=True) == kept(split=False)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(1,), (4,), (4, 1), (2, 2)], ids=str)
def test_all_micro_batches_of_a_step_count_in_a_group_of_any_size(shape, dim):
    """A group of one copies each weight to where others gather it, which is no step by hand."""
    ranks = math.prod(shape)
    with SimulatedGPU("H100", ranks=ranks) as gpu:
        dist.init_process_group("nccl", rank=0, world_size=ranks)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("copies", "parts")[-len(shape) :])
        net = model().cuda()
        for layer in [*net, net]:
            fully_shard(layer, mesh=mesh, shard_placement_fn=lambda weight: Shard(dim))
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            for _ in range(3):
                net(torch.randn(8, WIDE, device="cuda")).sum().backward()
            optimizer.step()
    products = 3 * (2 * LAYERS + LAYERS - 1)  # the first layer's input needs no gradient
    assert gpu.footprint.step_seconds.flops == products * 2 * 8 * WIDE * WIDE
    assert gpu.footprint.breakdown["parameters"] == LAYERS * LAYER // shape[-1]


def test_weights_that_are_gathered_in_float8_are_sent_at_half_the_bytes():
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def trained(float8):
        with SimulatedGPU("H100", ranks=4) as gpu:
            net = model().bfloat16().cuda()
            if float8:
                config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
                convert_to_float8_training(net, config=config)
            for layer in [*net, net]:
                fully_shard(layer, mesh=init_device_mesh("cuda", (4,)))
            return two_steps(gpu, net, torch.optim.AdamW(net.parameters()), 16, torch.bfloat16)

    plain, eight = trained(False), trained(True)
    assert plain.breakdown["parameters"] == eight.breakdown["parameters"]
    assert plain.breakdown["optimizer_states"] == eight.breakdown["optimizer_states"]
    # Gathered for both passes in 1 byte per weight, not 2; gradients are sent in bf16.
    gathered = 2 * LAYERS * WIDE * WIDE * 3 // 4
    assert plain.step_seconds.sent == 3 * gathered
    assert eight.step_seconds.sent == pytest.approx(2 * gathered, rel=0.01)


def test_what_is_offloaded_is_on_the_card_for_a_layer_only(gpu):
    mesh, net = dist.init_device_mesh("cuda", (4,)), model()
    for layer in [*net, net]:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    footprint = two_steps(gpu, net, torch.optim.AdamW(net.parameters()))
    assert net[0].weight.device.type == "cpu"
    for category in ("parameters", "gradients", "optimizer_states"):
        assert most(footprint, category) == 0
    assert LAYER < most(footprint, "temporary") <= 5 * LAYER


@pytest.mark.parametrize("foreach", [False, True])
def test_shards_on_the_host_without_data_are_stepped_there(gpu, foreach):
    with torch.device("meta"):
        net = torch.nn.Linear(4096, 4096, bias=False)
    fully_shard(net, offload_policy=CPUOffloadPolicy())
    net.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(net.parameters(), foreach=foreach)
    net(torch.ones(1, 4096, device="cuda")).sum().backward()
    optimizer.step()
    moment = optimizer.state[net.weight]["exp_avg"].to_local()
    assert moment.device.type == "cpu" and moment.shape == (1024, 4096)
    assert most(gpu.footprint, "optimizer_states") == 0


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_the_trainer_holds_what_the_recipe_holds(sharding, tmp_path):
    recipe = Recipe("llama-3-8b-tiny", seq_len=32, ranks=4, sharding=sharding)
    more = {"max_steps": 2, "save_strategy": "no", "disable_tqdm": True}
    if sharding == "zero3":
        more |= {"fsdp": True, "fsdp_config": {"version": 2, **FSDP_OF_LLAMA}}
    tokens = torch.zeros(32, dtype=torch.long)
    with SimulatedGPU(ranks=4) as gpu:
        trainer = Trainer(
            build(config(recipe.model), recipe.task),
            recipe.training_arguments(tmp_path, **more),
            train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8,
        )
        trainer.train()
    held, said = (of.timeline.levels for of in (gpu.footprint, simulate(recipe)))
    assert max(held["parameters"]) >= max(said["parameters"])
    for category in ("gradients", "optimizer_states"):
        assert max(held[category]) == pytest.approx(max(said[category]), rel=1e-4), category


FSDP_OF_LLAMA = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "reshard_after_forward": True,
}


# ---------------------------------------------------------------------- the link


def by_dtensor(net, mesh, plan, x):
    parallelize_module(net, mesh["parts"], plan)
    return net(x)


def by_a_call_of_its_own(net, mesh, asynchronous, x):
    y = net(x)
    dist.all_reduce(y, async_op=asynchronous)
    return y


def in_another_stream(net, mesh, _, x):
    y = net(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        dist.all_reduce(y)
    return y


def whole_layers(net, mesh, split, x):
    split(net)
    return net(x)


SEQUENCES = PLAN | {
    "0": ColwiseParallel(input_layouts=Shard(0)),
    "1": RowwiseParallel(output_layouts=Shard(0)),
    "2": ColwiseParallel(input_layouts=Shard(0)),
}


@pytest.mark.parametrize(
    ("run", "how", "waits"),
    [
        (by_dtensor, PLAN, True),
        (by_dtensor, SEQUENCES, True),  # gathered and scattered again
        (by_a_call_of_its_own, False, True),
        (by_a_call_of_its_own, True, False),
        (in_another_stream, None, False),
        (whole_layers, fully_shard, False),
        (whole_layers, DistributedDataParallel, False),
    ],
)
def test_collectives_whose_result_is_wanted_at_once_take_all_of_their_time(gpu, run, how, waits):
    """Beside products that last longer than what is sent by an H100's NVLink."""
    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("parts",))
    net = model().cuda()
    x = torch.randn(2**15, WIDE, device="cuda")
    run(net, mesh, how, x).sum().backward()
    found = gpu.footprint.step_seconds
    takes = found.sent / (link_rate(find_gpu("H100")) * EXPECTED.link)
    assert takes > 0
    assert found.parts["communication"] == pytest.approx(takes if waits else 0, abs=1e-9)


@pytest.mark.parametrize(
    ("gpu", "link", "said"),
    [
        ("H100", "string", "link is 'string': allowed are nvlink, pcie"),
        ("T4", "nvlink", "link is 'nvlink': allowed are pcie, .* for T4"),
    ],
)
def test_a_link_that_is_not_there_is_refused_in_one_line(gpu, link, said):
    for ask in (
        lambda: SimulatedGPU(gpu, ranks=2, link=link),
        lambda: simulate(Recipe("gpt2-tiny", seq_len=16), gpu, link),
    ):
        with refused(said):
            ask()


# ---------------------------------------------------------------------- refused, and put back


@pytest.mark.parametrize("ranks", [0, -1, 2.5, "two", True])
def test_ranks_are_whole_numbers_from_1(ranks):
    with refused("ranks is .*: allowed are whole numbers from 1"):
        SimulatedGPU(ranks=ranks)


def test_a_process_that_is_a_rank_already_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        with refused("rank 0 of a group of 3 already"):
            SimulatedGPU(ranks=2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: dist.init_process_group("nccl", rank=1, world_size=4), "rank 1 of 4"),
        (lambda: dist.init_process_group("nccl", rank=0, world_size=2), "rank 0 of 2"),
        (lambda: dist.rpc.init_rpc("one"), "torch.distributed.rpc.init_rpc"),
        (lambda: dist.pipelining.PipelineStage(None), "PipelineStage"),
        (lambda: dist.fsdp.FullyShardedDataParallel(model()), "use fully_shard"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(gpu, use, said):
    with refused(said, kind=NotSimulated):
        use()


def worker(rank, world, seen):
    """As PyTorch's tutorial of DistributedDataParallel starts it."""
    dist.init_process_group("nccl", rank=rank, world_size=world)
    seen.append((rank, dist.get_world_size()))
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 4])
def test_of_processes_that_a_script_starts_the_first_runs(ranks):
    seen = []
    with SimulatedGPU("H100", ranks=ranks):
        world = torch.cuda.device_count()
        torch.multiprocessing.spawn(worker, args=(world, seen), nprocs=world, join=True)
        with refused("ranks=3, or memlab run --ranks 3", kind=NotSimulated):
            torch.multiprocessing.spawn(worker, args=(3, seen), nprocs=3)
    assert seen == [(0, ranks)]


def test_an_update_by_hand_writes_to_its_part_and_gathers_the_others(gpu):
    """As nanochat's optimizers do, with views that are made under no_grad."""
    start("nccl")
    weight = torch.nn.Parameter(torch.randn(1024, 256, device="cuda"))
    for _ in range(2):
        (torch.randn(8, 1024, device="cuda") @ weight).square().mean().backward()
        with torch.no_grad():
            part = torch.empty_like(weight.grad[:256])
            sent = dist.reduce_scatter_tensor(part, weight.grad, async_op=True)
            sent.get_future().wait()
            mine = weight[:256]
            mine.add_(part, alpha=-0.1)
            dist.all_gather_into_tensor(weight, mine, async_op=True).get_future().wait()
    assert weight.grad.shape == (1024, 256)


def test_a_checkpoint_of_all_ranks_has_the_parts_of_the_first(gpu, tmp_path):
    dist.init_process_group("nccl")
    model = torch.nn.Linear(512, 512).cuda()
    fully_shard(model)
    state = {"model": model.state_dict()}
    checkpoint_files.save(state, checkpoint_id=tmp_path / "now")
    checkpoint_files.async_save(state, checkpoint_id=tmp_path / "later").result()
    before = allocated()
    checkpoint_files.load(state, checkpoint_id=tmp_path / "now")
    assert allocated() == before
    assert state["model"]["weight"].to_local().shape == (128, 512)
    assert len(list((tmp_path / "later").iterdir())) == 2  # its metadata and one file


def test_integers_that_ranks_send_are_those_of_the_first():
    with SimulatedGPU("H100", ranks=2):
        dist.init_process_group("nccl")
        sizes = torch.tensor([3, 5], device="cuda")
        one, two = torch.empty_like(sizes), torch.empty(4, dtype=torch.long, device="cuda")
        dist.all_to_all_single(one, sizes)
        dist.all_gather_into_tensor(two, sizes)
        assert (one.tolist(), two.tolist()) == ([3, 5], [3, 5, 3, 5])
        dist.recv(torch.empty_like(sizes), 1)
        rows = [torch.empty_like(sizes) for _ in range(2)]
        assert [row.tolist() for row in rows] == [[1, 1], [1, 1]]  # and not what lay there
        dist.all_gather(rows, sizes)
        assert [row.tolist() for row in rows] == [[3, 5], [3, 5]]
        padded = accelerate.utils.pad_across_processes(torch.ones(2, 7, device="cuda"), dim=1)
        assert padded.shape == (2, 7)


def test_objects_of_all_ranks_are_those_of_the_first():
    with SimulatedGPU("H100", ranks=2):
        dist.init_process_group("nccl")
        gathered, scattered = [None, None], [None]
        dist.gather_object(obj="mine", object_gather_list=gathered)
        dist.scatter_object_list(scattered, ["mine", "its"])
        assert (gathered, scattered) == (["mine", "mine"], ["mine"])
        dist.all_gather_object(object_list=gathered, obj="again")
        dist.broadcast_object_list(object_list=gathered)
        assert gathered == ["again", "again"]


def test_a_whole_checkpoint_is_gathered_from_the_shards():
    """By PyTorch's own functions for it, which ask its older FSDP for modules of its own."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    with SimulatedGPU("H100", ranks=4):
        start("nccl")
        layer = fully_shard(torch.nn.Linear(512, 512, device="cuda"))
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(2, 512, device="cuda")).sum().backward()
        optimizer.step()
        held = allocated()
        weights = state_dict.get_model_state_dict(layer, options=options)
        states = state_dict.get_optimizer_state_dict(layer, optimizer, options=options)
        assert allocated() == held
        assert torch.cuda.max_memory_allocated() >= held + 512 * 512 * 4
    moments = states["state"]["weight"]
    for whole in (weights["weight"], moments["exp_avg"], moments["exp_avg_sq"]):
        assert whole.shape == (512, 512) and whole.device.type == "cpu"
    assert issubclass(state_dict.FSDP, torch.nn.Module)
    assert state_dict.FSDP is torch.distributed.fsdp.FullyShardedDataParallel


@pytest.mark.parametrize("end", [None, ZeroDivisionError, KeyboardInterrupt, "out of memory"])
def test_everything_is_put_back_whatever_ended_it(end):
    kinds = ZeroDivisionError, KeyboardInterrupt, torch.OutOfMemoryError
    environment = dict(os.environ)
    kernels = registered_kernels()
    try:
        with SimulatedGPU(64 * MiB, ranks=4):
            changed = replacements()
            assert registered_kernels() != kernels
            start("gloo")
            fully_shard(model())
            if end == "out of memory":
                torch.zeros(64 * MiB, device="cuda")
            elif end:
                raise end
    except kinds:
        assert end is not None
    assert not replacements() and dict(os.environ) == environment
    packages = {getattr(one.target, "__module__", None) or one.target.__name__ for one in changed}
    assert len(changed) > 100 and {"torch.cuda", "torch._C", "torch.distributed"} <= packages
    first = {(one.target, one.name): one.original for one in reversed(changed)}
    for (target, name), original in first.items():
        assert getattr(target, name, MISSING) == original, (target, name)
    assert registered_kernels() == kernels
    assert not dist.is_initialized()
    storage = torch.zeros(8).untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0


def registered_kernels() -> dict[str, str]:
    """What the dispatcher has for every operator."""
    names = torch._C._dispatch_get_all_op_names()
    return {name: torch._C._dispatch_dump(name) for name in names}


# ---------------------------------------------------------------------- sharded parameters


@pytest.mark.parametrize("split", ["tp", "fsdp", "tp+fsdp"])
def test_sharded_parameters_are_drawn_in_place_and_follow_their_module_to_another_dtype(gpu, split):
    net = sharded(split)
    torch.nn.init.normal_(net[0].weight)
    assert allocated() == LAYER // 4
    net.to(dtype=torch.bfloat16)
    weight = net[0].weight
    assert (weight.dtype, weight.to_local().dtype) == (torch.bfloat16, torch.bfloat16)
    assert allocated() == LAYER // 8
    net(torch.ones(8, WIDE, device="cuda", dtype=torch.bfloat16)).sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_a_checkpoint_recomputes_what_is_spread_over_ranks():
    with SimulatedGPU("H100", ranks=2):
        local = torch.ones(4, 64, device="cuda", requires_grad=True)
        spread = DTensor.from_local(local, init_device_mesh("cuda", (2,)), [Replicate()])
        assert spread.get_device() == 0
        checkpoint(torch.relu, spread, use_reentrant=False).sum().backward()
        assert local.grad.shape == local.shape


def sharded(split):
    """A layer from the meta device, in shards on the card."""
    shape, names = ((2, 2), ("fsdp", "tp")) if "+" in split else ((4,), (split,))
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE, bias=False))
    if "tp" in split:
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    if "fsdp" in split:
        fully_shard(net, mesh=mesh["fsdp"])
    return net.to_empty(device="cuda")
