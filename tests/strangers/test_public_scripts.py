"""Training scripts of the kinds that stand in public repositories, each run as a file of its own.

Written anew and small after huggingface/transformers (examples/pytorch; Apache-2.0),
facebookresearch/mae and dino (CC BY-NC and Apache-2.0), karpathy/nanochat (MIT) and
meta-pytorch/torchtune (BSD-3). A function below is a script: its body is written to a file and run
as `memlab run` runs it. Convolutions over pictures are in test_torchvision.py, the Trainer in
test_trainer.py, updates by hand in test_script.py, ranks in test_process_group.py.
"""

import inspect
import textwrap

import pytest
from helpers import import_or_skip, most

from memlab.predict.script import try_script


def as_file(script, folder):
    """The body of a function as a script on the disk."""
    lines = inspect.getsource(script).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def ")) + 1
    path = folder / f"{script.__name__}.py"
    path.write_text(textwrap.dedent("\n".join(lines[start:])) + "\n")
    return path


# ruff: noqa: F841


def mae():
    """A masked autoencoder: a quarter of the patches, chosen by sorting noise, is encoded."""
    import math
    import sys

    import torch
    from torch import nn

    WIDTH, PATCH, SIDE = 128, 8, 64

    class Masked(nn.Module):
        def __init__(self, number=(SIDE // PATCH) ** 2):
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
            self.places = nn.Parameter(torch.zeros(1, number, WIDTH), requires_grad=False)
            how = {"activation": "gelu", "batch_first": True, "norm_first": True}
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, **how)
            self.mask = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.pixels = nn.Linear(WIDTH, 3 * PATCH**2)

        def forward(self, pictures, ratio=0.75):
            x = self.patches(pictures).flatten(2).transpose(1, 2) + self.places
            rows, number, width = x.shape
            keep = int(number * (1 - ratio))
            order = torch.rand(rows, number, device=x.device).argsort(dim=1)
            back = order.argsort(dim=1)
            chosen = order[:, :keep].unsqueeze(-1).expand(-1, -1, width)
            mask = torch.ones(rows, number, device=x.device)
            mask[:, :keep] = 0
            mask = mask.gather(1, back)
            x = self.encoder(x.gather(1, chosen))
            both = torch.cat([x, self.mask.expand(rows, number - keep, -1)], 1)
            both = both.gather(1, back.unsqueeze(-1).expand(-1, -1, width))
            wanted = pictures.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
            wanted = wanted.permute(0, 2, 3, 4, 5, 1).reshape(rows, number, -1)
            loss = (self.pixels(both) - wanted).pow(2).mean(dim=-1)
            return (loss * mask).sum() / mask.sum()

    torch.backends.cudnn.benchmark = True
    model = Masked().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(10):
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


def run_mlm_no_trainer():
    """Accelerate's loop over words masked at random, with accumulation and a saved state."""
    import math

    import numpy as np
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
    with accelerator.main_process_first():
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
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
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(4)))
            hits = np.equal(outputs.logits.argmax(-1).cpu(), batch["labels"].cpu())
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


def recipe_of_torchtune():
    """Checks of the build before the start, a group of one, bf16 by default, checkpointing."""
    import os

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
        apply_activation_checkpointing,
    )

    bf16 = (
        torch.cuda.is_available()
        and torch.version.cuda
        and torch.cuda.is_bf16_supported()
        and dist.is_nccl_available()
        and torch.cuda.nccl.version() >= (2, 10)
    )
    if not bf16:
        raise RuntimeError("bf16 precision was requested but not available on this hardware.")
    assert "sm_80" in torch.cuda.get_arch_list() and torch.backends.cuda.is_built()
    torch.backends.cudnn.deterministic = True
    assert torch.backends.cudnn.version() > 90000
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("cuda:nccl,cpu:gloo")
    assert dist.get_world_size() == 1

    class Layer(nn.Sequential):
        def __init__(self, width=512):
            up, down = (nn.Linear(*by, bias=False) for by in ((width, 1024), (1024, width)))
            super().__init__(nn.RMSNorm(width), up, nn.SiLU(), down)

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = nn.Sequential(*(Layer() for _ in range(4)))
    finally:
        torch.set_default_dtype(torch.float32)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    torch.cuda.reset_peak_memory_stats()
    for step in range(10):
        x = torch.randn(2, 256, 512, dtype=torch.bfloat16, device="cuda")
        loss = model(x).float().pow(2).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        stats = torch.cuda.memory_stats()
        active = stats["active_bytes.all.peak"] / 2**30
        print(f"{step}|loss {loss.item():.4f}|norm {norm.item():.4f}|peak {active:.3f} GiB")
    dist.destroy_process_group()


def speedrun():
    """Compiled functions, numbers of the host in the update, Muon by hand beside AdamW."""
    import torch
    from torch import nn

    @torch.compile(dynamic=False, fullgraph=True)
    def muon(p, grad, momentum, rate, beta):
        momentum.lerp_(grad, 1 - beta)
        g = grad.lerp_(momentum, beta)
        x = g.bfloat16()
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        p.sub_(rate * x.to(p.dtype))

    class Muon(torch.optim.Optimizer):
        def __init__(self, matrices):
            super().__init__(matrices, {})
            self.numbers = [torch.tensor(0.0) for _ in range(2)]

        @torch.no_grad()
        def step(self):
            params = self.param_groups[0]["params"]
            state, stacked = self.state[params[0]], torch.stack(params)
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(stacked)
            grads = torch.stack([p.grad for p in params])
            self.numbers[0].fill_(0.02), self.numbers[1].fill_(0.95)
            muon(stacked, grads, state["momentum"], *self.numbers)
            torch._foreach_copy_(params, list(stacked.unbind(0)))

    class Model(nn.Module):
        def __init__(self, width=256, words=512):
            super().__init__()
            self.tokens = nn.Embedding(words, width, dtype=torch.bfloat16)
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, x):
            x = nn.functional.rms_norm(self.tokens(x), (256,))
            for layer in self.layers:
                x = x + nn.functional.relu(layer(x)).square()
            return 15 * torch.tanh(self.head(x).float() / 15)

    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cuda")
    raw, model = model, torch.compile(model, dynamic=False)
    adamw = torch.optim.AdamW([raw.tokens.weight, raw.head.weight], lr=3e-4, foreach=False)
    optimizers = Muon([layer.weight for layer in raw.layers]), adamw
    for step in range(10):
        tokens = torch.randint(512, (4, 64), device="cuda")
        with torch.amp.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens).view(-1, 512), tokens.view(-1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        print(f"step {step} | loss {loss.item():.4f}")


def dino():
    """A student and its moving average over crops of two sizes, in a group of processes."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", world_size=1, rank=0)
    torch.cuda.set_device(0)
    dist.barrier()

    class Net(nn.Module):
        def __init__(self, width=256, out=1024):
            super().__init__()
            self.patches = nn.Conv2d(3, width, 16, 16)
            self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            last = nn.Linear(width, out, bias=False)
            self.last = nn.utils.parametrizations.weight_norm(last)
            self.last.parametrizations.weight.original0.requires_grad = False

        def forward(self, crops):
            sizes = torch.tensor([crop.shape[-1] for crop in crops])
            counts = torch.unique_consecutive(sizes, return_counts=True)[1]
            out, start = [], 0
            for end in torch.cumsum(counts, 0):
                x = self.patches(torch.cat(crops[start:end])).flatten(2).mean(2)
                out.append(self.last(F.normalize(self.mlp(x), dim=-1)))
                start = end
            return torch.cat(out)

    student, teacher = Net().cuda(), Net().cuda()
    teacher.load_state_dict(student.state_dict())
    student = nn.parallel.DistributedDataParallel(student, device_ids=[0])
    for p in teacher.parameters():
        p.requires_grad = False
    shadow = [p.detach().clone() for p in teacher.parameters()]
    center = torch.zeros(1, 1024).cuda()
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad])
    scaler = torch.cuda.amp.GradScaler()
    for _ in range(10):
        pictures = [torch.rand(4, 3, n, n).cuda(non_blocking=True) for n in (64, 64, 32, 32)]
        with torch.cuda.amp.autocast():
            taught, learnt = teacher(pictures[:2]), student(pictures)
            targets = F.softmax((taught - center) / 0.04, dim=-1).detach().chunk(2)
            guesses = [F.log_softmax(one / 0.1, dim=-1) for one in learnt.chunk(4)]
            losses = [
                -(target * guess).sum(dim=-1).mean()
                for i, target in enumerate(targets)
                for j, guess in enumerate(guesses)
                if i != j
            ]
            loss = sum(losses) / len(losses)
        mean = taught.sum(dim=0, keepdim=True)
        dist.all_reduce(mean)
        center = center * 0.9 + mean / (len(taught) * dist.get_world_size()) * 0.1
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in student.parameters():
            if p.grad is not None:
                norm = p.grad.data.norm(2)
                if 3.0 / (norm + 1e-6) < 1:
                    p.grad.data.mul_(3.0 / (norm + 1e-6))
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), student.module.parameters(), strict=True):
                mine.data.mul_(0.996).add_((1 - 0.996) * its.detach().data)
            for mine, its in zip(shadow, teacher.parameters(), strict=True):
                mine.lerp_(its, 0.01)
        torch.cuda.synchronize()
        print(f"loss {loss.item():.4f}")


def qdora():
    """DoRA over a 4-bit base by peft and bitsandbytes, in a plain loop."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    config = AutoConfig.for_model(
        "llama",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained("base")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
    model = AutoModelForCausalLM.from_pretrained(
        "base", quantization_config=how, device_map={"": 0}, dtype=torch.float16
    )
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(
        model, LoraConfig(r=8, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    trained, whole = model.get_nb_trainable_parameters()
    assert (trained, whole) == (74_240, 1_648_384)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    tokens = torch.randint(0, 512, (2, 64), device="cuda")
    for _ in range(10):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def grpo():
    """TRL's trainer of GRPO: it generates inside, and compares with a reference model."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from memlab.book.corpora import tokenizer

    texts = ["the cat sat on the mat and looked at the rain"] * 16
    words = tokenizer(texts, vocab_size=512, kind="bpe")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained("policy")
    words.save_pretrained("policy")
    trainer = GRPOTrainer(
        model="policy",
        reward_funcs=lambda completions, **kwargs: [float(len(one)) for one in completions],
        args=GRPOConfig(
            output_dir="grpo",
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=16,
            beta=0.04,
            max_steps=3,
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
    )
    trainer.train()


VIT_LAYER = 12 * 128**2 + 13 * 128
MAE = 3 * 64 * 128 + 128 + VIT_LAYER + 128 + 128 * 192 + 192
MLM_LAYER = 4 * 64 * 64 + 2 * 64 * 128 + 9 * 64 + 128
MLM_WEIGHTS = (520 + 64 + 2 + 2) * 64 + 2 * MLM_LAYER + 64 * 64 + 3 * 64 + 520
MATRICES, EMBEDDING, HEAD = 4 * 256**2 * 4, 512 * 256 * 2, 512 * 256 * 4
DINO = 3 * 16**2 * 256 + 256 + 2 * (256**2 + 256) + 1024 * 256  # and a length for each output
GRPO = (2 * 512 * 64 + 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64) * 4
LINEAR = 2 * (4 * 256**2 + 3 * 256 * 512)  # of QDoRA's base, in 4 bits, a scale for each 64
DORA = 74_240 * 4

FROZEN = 803_204 + 144_423 + 88_384  # a UNet, an autoencoder, a text encoder
# Of rank 4: three blocks of 32 channels and one of 64, each with two attentions.
ADAPTERS = 4 * (3 * (6 * 64 + 2 * (64 + 32)) + 8 * 128)

# Script, how it is run, then bytes: parameters at the peak, most gradients, most states.
SCRIPTS = [
    (mae, {}, 4 * MAE + 4 * 64 * 128, 4 * MAE, 8 * MAE),
    (run_mlm_no_trainer, {}, 4 * MLM_WEIGHTS, 4 * MLM_WEIGHTS, 8 * MLM_WEIGHTS),
    # A fused step counts on the card, for each weight.
    (recipe_of_torchtune, {"gpu": "A100-40GB"}, 8_392_704, 8_392_704, 2 * 8_392_704 + 4 * 12),
    (
        speedrun,
        {"gpu": "H100", "compile_eagerly": True},
        MATRICES + EMBEDDING + HEAD,
        MATRICES + EMBEDDING + HEAD,
        MATRICES + 2 * (EMBEDDING + HEAD),
    ),
    (dino, {}, 8 * (DINO + 1024), 8 * DINO, 8 * DINO),
    (
        qdora,
        {},
        LINEAR // 2 + LINEAR // 64 * 4 + 14 * 16 * 4 + 4 * (2 * 512 * 256 + 5 * 256) + DORA,
        DORA,
        2 * DORA,
    ),
    (text_to_image_lora, {}, 2 * FROZEN + 4 * ADAPTERS, 4 * ADAPTERS, 8 * ADAPTERS),
    (grpo, {"gpu": "A100-40GB"}, 2 * GRPO, GRPO, 2 * GRPO + 4 * 21),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "script, how, weights, gradients, states", SCRIPTS, ids=lambda it: getattr(it, "__name__", "")
)
def test_it_trains_and_holds_what_is_reckoned(
    script, how, weights, gradients, states, tmp_path, monkeypatch
):
    import_or_skip({grpo: "trl", text_to_image_lora: "diffusers"}.get(script, "torch"))
    monkeypatch.chdir(tmp_path)
    ran = try_script(as_file(script, tmp_path), **{"gpu": "T4"} | how)
    assert (ran.steps, ran.status, ran.error) == (2, 0, "")
    assert ran.footprint.breakdown["parameters"] == weights
    assert most(ran.footprint, "gradients") == gradients
    assert most(ran.footprint, "optimizer_states") == states
