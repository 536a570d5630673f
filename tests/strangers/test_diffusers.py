"""diffusers' tutorial of unconditional training, with a moving average of the weights, anew.

github.com/huggingface/diffusers, docs/source/en/tutorials/basic_training.md (Apache-2.0)
"""

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from helpers import assert_as_on_the_cpu, on_the_cpu

from memlab import SimulatedGPU


def train():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = diffusers.UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=1000)
    ema = EMAModel(
        model.parameters(), decay=0.99, model_cls=diffusers.UNet2DModel, model_config=model.config
    )
    ema.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 4)
    pictures = torch.rand(8, 3, 32, 32)
    logged = []
    for clean in torch.utils.data.DataLoader(pictures, 4, shuffle=True):
        clean = clean.to(device)
        noise = torch.randn(clean.shape, device=clean.device)
        times = torch.randint(
            0,
            noise_scheduler.config.num_train_timesteps,
            (4,),
            device=clean.device,
            dtype=torch.int64,
        )
        noisy = noise_scheduler.add_noise(clean, noise, times)
        predicted = model(noisy, times, return_dict=False)[0]
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        logged.append({"loss": loss.detach().item(), "lr": schedule.get_last_lr()[0]})
    return logged


def test_it_holds_what_the_same_loop_holds_on_a_real_cpu():
    cpu, logged = on_the_cpu(train)
    with SimulatedGPU("T4") as gpu:
        assert [line["lr"] for line in train()] == [line["lr"] for line in logged]
    # The backward of softmax writes what it gets once more, on a card: 4 rows, 8 heads, 16 x 16
    # places. The pictures and the scheduler's tables lie on the host.
    scratch = 4 * 8 * 256**2 * 4
    assert_as_on_the_cpu(gpu.footprint, cpu, more_there=-scratch, small=2**18)
