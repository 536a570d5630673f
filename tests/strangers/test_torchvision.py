"""PyTorch's ImageNet example on torchvision's ResNet-18, written anew and small.

github.com/pytorch/examples, imagenet/main.py (BSD-3-Clause)
"""

import pytest
import torch
from helpers import assert_as_on_the_cpu, import_or_skip, on_the_cpu
from torch import nn

from memlab import SimulatedGPU

torchvision = import_or_skip("torchvision")


class AverageMeter:
    sum = count = 0

    def update(self, val, n):
        self.val = val
        self.sum += val * n
        self.count += n

    def __str__(self):
        return f"{self.val:.4e} ({self.sum / self.count:.4e})"


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        batch_size = target.size(0)
        _, chosen = output.topk(max(topk), 1, True, True)
        correct = chosen.t().eq(target.view(1, -1).expand_as(chosen.t()))
        return [
            correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / batch_size)
            for k in topk
        ]


def train(images, channels_last):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.DataParallel(model).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, foreach=False
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    loader = torch.utils.data.DataLoader(images, batch_size=12, shuffle=True, pin_memory=True)
    losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    for pictures, target in loader:
        pictures = pictures.to(device, non_blocking=True)
        if channels_last:
            pictures = pictures.contiguous(memory_format=torch.channels_last)
        target = target.to(device, non_blocking=True)
        output = model(pictures)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), pictures.size(0))
        top1.update(acc1[0], pictures.size(0))
        top5.update(acc5[0], pictures.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    return f"Loss {losses} Acc@1 {top1} Acc@5 {top5}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("channels_last", [False, True])
def test_it_holds_what_the_same_loop_holds_on_a_real_cpu(channels_last):
    images = torchvision.datasets.FakeData(24, (3, 128, 128), 10, torchvision.transforms.ToTensor())
    cpu, _ = on_the_cpu(lambda: train(images, channels_last=channels_last))
    with SimulatedGPU("T4") as gpu:
        printed = train(images, channels_last=channels_last)
    assert printed.startswith("Loss 1.0000e+00 (1.0000e+00) Acc@1")
    assert_as_on_the_cpu(gpu.footprint, cpu)
