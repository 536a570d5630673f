"""Training scripts of the kinds that stand in public repositories, each run as a file of its own.

Written anew and small after pytorch/examples (imagenet, mnist, tensor parallel, FSDP2; BSD-3),
huggingface/transformers (examples/pytorch; Apache-2.0), facebookresearch/mae and dino (CC BY-NC and
Apache-2.0), karpathy/nanochat (MIT), meta-pytorch/torchtune (BSD-3) and Lightning-AI/litgpt
(Apache-2.0). A function below is a script: its body is written to a file and run as
`memlab run` runs it.
"""

import inspect
import textwrap

import pytest
from helpers import import_or_skip

from memlab.running import try_script


def as_file(script, folder):
    """The body of a function as a script on the disk."""
    lines = inspect.getsource(script).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def ")) + 1
    path = folder / f"{script.__name__}.py"
    path.write_text(textwrap.dedent("\n".join(lines[start:])) + "\n")
    return path


def most(ran, category) -> int:
    """The most bytes that a category had."""
    return max(ran.footprint.timeline.levels[category])


# ruff: noqa: F841


def imagenet():
    """Convolutions, batch norm, channels last, autocast, SGD with momentum, a checkpoint."""
    import argparse
    import os
    import shutil

    import torch
    import torch.backends.cudnn as cudnn
    from torch import nn
    from torch.optim.lr_scheduler import StepLR

    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--print-freq", default=1, type=int)
    args = parser.parse_args()
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    device = torch.accelerator.current_accelerator()
    cudnn.benchmark = True

    def block(inside, outside, stride):
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        )

    model = nn.Sequential(
        block(3, 32, 2),
        nn.MaxPool2d(3, 2, 1),
        block(32, 64, 2),
        block(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    model = nn.DataParallel(model).to(device, memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    scaler = torch.amp.GradScaler("cuda")
    images = torch.utils.data.TensorDataset(
        torch.rand(32, 3, 64, 64), torch.randint(0, 10, (32,))
    )
    sets = [
        torch.utils.data.DataLoader(
            images, batch_size=args.batch_size, shuffle=shuffle, num_workers=0, pin_memory=True
        )
        for shuffle in (True, False)
    ]
    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        for i, (pictures, target) in enumerate(sets[0]):
            pictures = pictures.to(device, non_blocking=True, memory_format=torch.channels_last)
            target = target.to(device, non_blocking=True)
            with torch.autocast("cuda", torch.float16):
                output = model(pictures)
                loss = criterion(output, target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if i % args.print_freq == 0:
                _, chosen = output.topk(5, 1, True, True)
                correct = chosen.t().eq(target.view(1, -1).expand(5, -1))
                print(f"Loss {loss.item():.4e} Acc@1 {correct[:1].float().sum().item()}")
        model.eval()
        with torch.no_grad():
            for pictures, target in sets[1]:
                output = model(pictures.to(device)).argmax(1)
                hits = (output == target.to(device)).float().mean()
        scheduler.step()
        is_best = hits > best
        best = max(hits, best)
        torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "c.pth")
        if is_best:
            shutil.copyfile("c.pth", "best.pth")
    os.remove("c.pth")


def mnist():
    """Dropout, nll_loss and Adadelta; a test after each epoch."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.optim.lr_scheduler import StepLR

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 32, 3, 1)
            self.conv2 = nn.Conv2d(32, 64, 3, 1)
            self.dropout1 = nn.Dropout(0.25)
            self.dropout2 = nn.Dropout(0.5)
            self.fc1 = nn.Linear(9216, 128)
            self.fc2 = nn.Linear(128, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
            return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)

    torch.manual_seed(1)
    device = torch.accelerator.current_accelerator()
    digits = torch.utils.data.TensorDataset(torch.rand(64, 1, 28, 28), torch.randint(0, 10, (64,)))
    settings = {"num_workers": 0, "pin_memory": True, "shuffle": True}
    train = torch.utils.data.DataLoader(digits, batch_size=16, **settings)
    test = torch.utils.data.DataLoader(digits, batch_size=32, **settings)
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        model.train()
        for data, target in train:
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        total = correct = 0
        with torch.no_grad():
            for data, target in test:
                data, target = data.to(device), target.to(device)
                output = model(data)
                total += F.nll_loss(output, target, reduction="sum").item()
                guess = output.argmax(dim=1, keepdim=True)
                correct += guess.eq(target.view_as(guess)).sum().item()
        print(f"loss {total / 64:.4f}, accuracy {correct}/64")
        scheduler.step()


def mae():
    """A masked autoencoder: a quarter of the patches, chosen by sorting noise, is encoded."""
    import math
    import sys

    import torch
    from torch import nn

    WIDTH, PATCH, SIDE = 128, 8, 64

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x):
            y = self.norm1(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    class Masked(nn.Module):
        def __init__(self, number=(SIDE // PATCH) ** 2):
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
            self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.places = nn.Parameter(torch.zeros(1, number, WIDTH), requires_grad=False)
            self.encoder = nn.ModuleList([Block(WIDTH) for _ in range(2)])
            self.between = nn.Linear(WIDTH, 64)
            self.mask = nn.Parameter(torch.zeros(1, 1, 64))
            self.decoder = nn.ModuleList([Block(64)])
            self.pixels = nn.Linear(64, 3 * PATCH**2)
            nn.init.trunc_normal_(self.mask, std=0.02)

        def forward(self, pictures, ratio=0.75):
            x = self.patches(pictures).flatten(2).transpose(1, 2) + self.places
            rows, number, width = x.shape
            keep = int(number * (1 - ratio))
            noise = torch.rand(rows, number, device=x.device)
            order = noise.argsort(dim=1)
            back = order.argsort(dim=1)
            chosen = order[:, :keep].unsqueeze(-1).expand(-1, -1, width)
            mask = torch.ones(rows, number, device=x.device)
            mask[:, :keep] = 0
            mask = mask.gather(1, back)
            x = torch.cat([self.first.expand(rows, -1, -1), x.gather(1, chosen)], 1)
            for block in self.encoder:
                x = block(x)
            x = self.between(x)
            masked = self.mask.expand(rows, number - keep, -1)
            both = torch.cat([x[:, 1:], masked], 1)
            both = both.gather(1, back.unsqueeze(-1).expand(-1, -1, 64))
            for block in self.decoder:
                both = block(both)
            wanted = pictures.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
            wanted = wanted.permute(0, 2, 3, 4, 5, 1).reshape(rows, number, -1)
            loss = (self.pixels(both) - wanted).pow(2).mean(dim=-1)
            return (loss * mask).sum() / mask.sum()

    torch.backends.cudnn.benchmark = True
    model = Masked().to("cuda")
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cuda")
    for step in range(10):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * (0.5 + 0.5 * math.cos(math.pi * step / 10))
        pictures = torch.rand(16, 3, SIDE, SIDE).to("cuda", non_blocking=True)
        with torch.autocast("cuda"):
            loss = model(pictures)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training")
            sys.exit(1)
        scaler.scale(loss).backward(create_graph=False)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        print(f"loss {loss.item():.4f} mem {torch.cuda.max_memory_allocated() / 2**20:.0f}")


def run_clm():
    """Texts concatenated into blocks, the Trainer, an evaluation, a model saved."""
    import math
    from dataclasses import dataclass, field
    from itertools import chain

    from datasets import Dataset
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        HfArgumentParser,
        Trainer,
        TrainingArguments,
        default_data_collator,
        set_seed,
    )

    from memlab.book.corpora import tokenizer

    @dataclass
    class DataArguments:
        block_size: int = field(default=64)

    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    texts = ["the old clock told every hour to the cat that slept below it. " * 4] * 60
    words = tokenizer(texts, vocab_size=512, kind="bpe")
    raw = Dataset.from_dict({"text": texts}).train_test_split(test_size=0.2, seed=0)

    def group(examples):
        joined = {name: list(chain(*examples[name])) for name in examples}
        total = len(joined["input_ids"]) // data.block_size * data.block_size
        blocks = {
            name: [t[i : i + data.block_size] for i in range(0, total, data.block_size)]
            for name, t in joined.items()
        }
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    tokens = raw.map(lambda rows: words(rows["text"]), batched=True, remove_columns=["text"])
    blocks = tokens.map(group, batched=True)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=512, n_embd=64, n_layer=2, n_head=2, n_positions=64
    )
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        processing_class=words,
        data_collator=default_data_collator,
        compute_metrics=lambda it: {"accuracy": float((it[0] == it[1]).mean())},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )
    result = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    found = trainer.evaluate()
    print(f"perplexity {math.exp(found['eval_loss']):.2f}")


def run_mlm_no_trainer():
    """Accelerate's loop over words masked at random, with accumulation and a saved state."""
    import math

    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import (
        AutoConfig,
        AutoModelForMaskedLM,
        DataCollatorForLanguageModeling,
        get_scheduler,
    )

    from memlab.book.corpora import tokenizer

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="fp16")
    texts = ["the cat sat on the mat and looked at the rain"] * 32
    words = tokenizer(texts, vocab_size=512)
    collator = DataCollatorForLanguageModeling(tokenizer=words, mlm_probability=0.15)
    rows = [words(text, truncation=True, max_length=32) for text in texts]
    train = DataLoader(rows, shuffle=True, collate_fn=collator, batch_size=4)
    test = DataLoader(rows[:8], collate_fn=collator, batch_size=4)
    config = AutoConfig.for_model(
        "bert",
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = AutoModelForMaskedLM.from_config(config)
    model.resize_token_embeddings(520)
    rest = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(r in n for r in rest)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(r in n for r in rest)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=8)
    model, optimizer, train, test, scheduler = accelerator.prepare(
        model, optimizer, train, test, scheduler
    )
    for epoch in range(2):
        model.train()
        total = 0
        for batch in train:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                total += outputs.loss.detach().float()
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        for batch in test:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(4)))
        print(f"epoch {epoch}: perplexity {math.exp(torch.mean(torch.cat(losses)))}")
        accelerator.save_state(f"epoch_{epoch}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("out", save_function=accelerator.save)


def text_to_image_lora():
    """A text encoder and an autoencoder in half precision, adapters on the UNet's attention."""
    import diffusers
    import torch
    import torch.nn.functional as F
    from accelerate import Accelerator
    from diffusers.training_utils import cast_training_params, compute_snr
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict
    from transformers import CLIPTextConfig, CLIPTextModel

    accelerator = Accelerator(mixed_precision="fp16")
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=1000)
    text = CLIPTextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2
    )
    text_encoder = CLIPTextModel(text)
    diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8).save_pretrained("vae")
    vae = diffusers.AutoencoderKL.from_pretrained("vae")
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    for part in (unet, vae, text_encoder):
        part.requires_grad_(False)
        part.to(accelerator.device, dtype=torch.float16)
    unet.add_adapter(
        LoraConfig(
            r=4,
            lora_alpha=4,
            init_lora_weights="gaussian",
            target_modules=["to_k", "to_q", "to_v", "to_out.0"],
        )
    )
    cast_training_params(unet, dtype=torch.float32)
    layers = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(layers, lr=1e-4)
    data = [
        {"pixel_values": torch.rand(3, 16, 16), "input_ids": torch.randint(0, 256, (77,))}
        for _ in range(8)
    ]
    loader = torch.utils.data.DataLoader(data, shuffle=True, batch_size=2)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(unet):
            pixels = batch["pixel_values"].to(dtype=torch.float16)
            latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            times = torch.randint(0, 1000, (len(latents),), device=latents.device).long()
            noisy = noise_scheduler.add_noise(latents, noise, times)
            states = text_encoder(batch["input_ids"], return_dict=False)[0]
            predicted = unet(noisy, times, states, return_dict=False)[0]
            snr = compute_snr(noise_scheduler, times)
            weights = torch.stack([snr, 5.0 * torch.ones_like(times)], dim=1).min(dim=1)[0] / snr
            loss = F.mse_loss(predicted.float(), noise.float(), reduction="none")
            loss = (loss.mean(dim=list(range(1, loss.ndim))) * weights).mean()
            mean = accelerator.gather(loss.repeat(2)).mean().item()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(layers, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    unet = accelerator.unwrap_model(unet).to(torch.float32)
    print(len(get_peft_model_state_dict(unet)))


def ddp():
    """DistributedDataParallel with its sampler, as torchrun starts it."""
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(local)
    dist.init_process_group(torch.distributed.get_default_backend_for_device("cuda"))
    device = torch.device("cuda", local)
    data = torch.utils.data.TensorDataset(torch.rand(64, 512), torch.rand(64, 512))
    sampler = DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, pin_memory=True)
    assert len(loader) == 64 // 8 // dist.get_world_size() and dist.get_rank() == rank == 0
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(device)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, device_ids=[local])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for source, target in loader:
            optimizer.zero_grad()
            output = model(source.to(device))
            loss = torch.nn.functional.mse_loss(output, target.to(device))
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            torch.save(model.module.state_dict(), "ddp.pt")
            print(f"epoch {epoch}: {total.item():.4f}")
        dist.barrier()
    dist.destroy_process_group()


def fsdp2():
    """A model from the meta device in shards, mixed precision, prefetching, a full checkpoint."""
    import os

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Shard

    need = 2
    if torch.accelerator.device_count() < need:
        raise SystemExit(f"this example needs {need} devices")
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"{torch.accelerator.current_accelerator().type}:{rank}")
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend="nccl", device_id=device)

    class Layer(nn.Module):
        def __init__(self, width=256):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.reset_parameters()

        def reset_parameters(self):
            for part in (self.norm, self.wide, self.back):
                part.reset_parameters()

        def forward(self, x):
            return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))

    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    model.to_empty(device="cuda")
    for layer in model:
        layer.reset_parameters()
    for one, other in zip(model[:-1], model[1:], strict=True):
        one.set_modules_to_forward_prefetch([other])
    weight = model[0].wide.weight
    assert isinstance(weight, DTensor) and weight.placements == (Shard(0),)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        x = torch.randn(32, 256, device=device)
        loss = model(x).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        states = get_model_state_dict(model, options=options)
        if rank == 0:
            torch.save(states, "fsdp2.pt")
        assert get_optimizer_state_dict(model, optimizer, options=options)
    dist.destroy_process_group()


def tensor_parallel():
    """Column- and row-wise layers between sequences that are split, over a mesh of all devices."""
    import os

    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))

    class Layer(nn.Module):
        def __init__(self, width=512):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    model = nn.Sequential(Layer(), Layer()).to("cuda")
    for layer in model:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    parallelize_module(
        model,
        mesh,
        PrepareModuleInput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_output=True,
        ),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for step in range(10):
        torch.manual_seed(step)
        output = model(torch.rand(4, 64, 512, device="cuda"))
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} done")
