"""Lightning over MPI: its Trainer with its DDP strategy.

mpiexec -n 2 python examples/lightning_run.py
"""

import lightning
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import unisono


class Digits(lightning.LightningModule):
    """A network that reads handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.4f}")

    def test_step(self, batch: list[torch.Tensor], _: int) -> None:
        images, labels = batch
        right = (self.network(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


lightning.seed_everything(0, verbose=False)
images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, test = random_split(digits, [0.8, 0.2])

environment = MPIEnvironment()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=environment.world_size(),  # on one machine; on several: ranks of one, and num_nodes
    strategy=DDPStrategy(cluster_environment=environment, process_group_backend="unisono"),
    max_epochs=8,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Digits()
trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
(result,) = trainer.test(model, DataLoader(test, batch_size=32), verbose=False)
if trainer.is_global_zero:
    print(f"accuracy {result['accuracy']:.3f} on {trainer.world_size} ranks")
