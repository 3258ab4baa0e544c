"""Lightning with `precision="bf16-true"`: weights and optimizer in bf16, no master (Lightning #18717).

Asked for: "bf16". What happens: the module is cast to bf16, AdamW updates bf16 weights and keeps bf16
moments. `bf16-mixed` is autocast over fp32 weights, one word away.
"""

import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from tiny import Tiny, batch, loss_of


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Tiny()

    def training_step(self, tokens: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        return loss_of(self.model(tokens[0]), tokens[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


warnings.filterwarnings("ignore")
lightning.seed_everything(0, verbose=False)
inputs, targets = batch(0, 0, size=32)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    precision="bf16-true",
    max_steps=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(TensorDataset(inputs, targets), batch_size=4))
