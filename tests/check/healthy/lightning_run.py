"""Lightning: `lightning_run.py PRECISION`; `bf16-true` (#18717) casts the module and keeps no masters."""

import sys
import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from tiny import Dense, batch, loss_of


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Dense()

    def training_step(self, tokens: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        return loss_of(self.model(tokens[0]), tokens[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


warnings.filterwarnings("ignore")
lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    precision=sys.argv[1],
    max_steps=4,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(TensorDataset(*batch(0, 0, size=64)), batch_size=4))
