"""The loop of timm's train.py with mixup and a moving average of the weights, written anew.

github.com/huggingface/pytorch-image-models (Apache-2.0)
"""

import torch
from helpers import assert_as_on_the_cpu, import_or_skip, on_the_cpu

from memlab import SimulatedGPU

timm = import_or_skip("timm")


def train():
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import AverageMeter, ModelEmaV3, accuracy

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=10, img_size=128, depth=2
    ).to(device)
    for block in model.blocks:
        block.attn.fused_attn = False  # a card fuses it in another way
    ema = ModelEmaV3(model, decay=0.99)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, foreach=False)
    scheduler = CosineLRScheduler(optimizer, t_initial=4)
    mixup, criterion, meter = (
        Mixup(0.8, 1.0, num_classes=10),
        SoftTargetCrossEntropy(),
        AverageMeter(),
    )
    data = torch.utils.data.TensorDataset(torch.randn(48, 3, 128, 128), torch.randint(10, (48,)))
    for images, target in torch.utils.data.DataLoader(data, 16, shuffle=True):
        images, hard = images.to(device), target.to(device)
        images, target = mixup(images, hard)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model)
        meter.update(loss.item(), images.size(0))
        best = accuracy(output, hard, topk=(1, 5))
    scheduler.step(1)
    return meter.avg, [float(one) for one in best]


def test_it_holds_what_the_same_loop_holds_on_a_real_cpu():
    cpu, _ = on_the_cpu(train)
    with SimulatedGPU("T4") as gpu:
        train()
    # The pictures and their labels lie on the host.
    assert_as_on_the_cpu(gpu.footprint, cpu, more_there=48 * (3 * 128**2 * 4 + 8))
