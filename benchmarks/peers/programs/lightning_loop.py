"""Lightning's Trainer."""

import logging
import tempfile
import warnings

import lightning
import torch
from common import Case, asked
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.model = case, case.model()

    def training_step(self, batch: dict, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        self.last = self.model(**batch).loss
        return self.last

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the common optimizer; Lightning does not clip gradients of a fused one."""
        return self.case.optimizer(self.model, fused=False)

    def on_train_batch_end(self, *_: object) -> None:
        """Report a completed step."""
        self.case.said(self.last.detach())


def main() -> None:
    """Train on `case`."""
    case, flags = asked("compile")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module(case)
    if flags.compile:
        module.model.compile()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=case.world_size,
            precision="bf16-mixed" if case.bf16 else "32-true",
            strategy="ddp" if case.world_size > 1 else "auto", max_steps=case.steps,
            gradient_clip_val=case.clip, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            default_root_dir=folder,
        )  # fmt: skip
        loader = DataLoader(case.data(), batch_size=case.share, sampler=case.order())
        trainer.fit(module, loader)
    case.end()


if __name__ == "__main__":
    main()
