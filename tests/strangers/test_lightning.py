"""Lightning's first steps (github.com/Lightning-AI/pytorch-lightning, Apache-2.0), written anew."""

from pathlib import Path

import lightning
import torch
from helpers import assert_as_on_the_cpu, on_the_cpu
from torch import nn

from memlab import SimulatedGPU


class AutoEncoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 784))

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.error(batch))

    def error(self, batch):
        x = batch[0].view(batch[0].size(0), -1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3, foreach=False)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }


def train(folder, accelerator, precision="32-true"):
    lightning.seed_everything(0, verbose=False)
    pictures = torch.utils.data.TensorDataset(torch.rand(512, 1, 28, 28), torch.zeros(512))
    train_set, valid_set = torch.utils.data.random_split(pictures, [384, 128])
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(folder, monitor="val_loss")
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=precision,
        max_epochs=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    model = AutoEncoder()
    trainer.fit(
        model,
        torch.utils.data.DataLoader(train_set, 128, shuffle=True),
        torch.utils.data.DataLoader(valid_set, 128),
    )
    return trainer.global_step, checkpoint.best_model_path, model.device


def test_it_holds_what_the_same_loop_holds_on_a_real_cpu(tmp_path):
    cpu, (steps, _, _) = on_the_cpu(lambda: train(tmp_path / "cpu", "cpu"))
    found = {}
    for precision in ("32-true", "16-mixed", "bf16-mixed"):
        with SimulatedGPU("A100-40GB") as gpu:
            done, best, device = train(tmp_path / precision, "gpu", precision)
        assert (done, device.type) == (steps, "cpu")  # it leaves the model on the host
        assert Path(best).stat().st_size > 0
        found[precision] = gpu.footprint
    pictures = 512 * (28 * 28 + 1) * 4
    assert_as_on_the_cpu(found["32-true"], cpu, more_there=pictures, small=64)
    for footprint in found.values():
        for category in ("parameters", "gradients", "optimizer_states"):
            assert footprint.breakdown[category] == found["32-true"].breakdown[category]
