"""transformers' Trainer, with the flags that its performance guide recommends."""

import tempfile

from common import Case, Order, asked
from transformers import Trainer, TrainingArguments


class InOrder(Trainer):
    """Reads samples in order, and reports each step's loss."""

    case: Case

    def _get_train_sampler(self, *_: object) -> Order:
        case = self.case
        whole = Order(case)
        # accelerate distributes batches among ranks one by one, as all programs do.
        whole._places = list(range(case.steps * case.batch))
        return whole

    def training_step(self, *args: object, **kwargs: object) -> object:
        """Run Trainer's step."""
        loss = super().training_step(*args, **kwargs)
        self.last = loss
        return loss


def main() -> None:
    """Train on `case`."""
    case, flags = asked("compile")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=case.steps, per_device_train_batch_size=case.share,
            learning_rate=case.lr, lr_scheduler_type="constant", weight_decay=0.0,
            adam_beta1=case.betas[0], adam_beta2=case.betas[1], max_grad_norm=case.clip,
            optim="adamw_torch_fused", bf16=case.bf16, use_cpu=case.device == "cpu",
            torch_compile=flags.compile, logging_strategy="no", save_strategy="no",
            report_to=[], disable_tqdm=True, remove_unused_columns=False,
            ddp_find_unused_parameters=False,
            # If this is on, as by default, transformers 5.23 multiplies a classifier's loss by the
            # number of ranks.
            average_tokens_across_devices=not case.labelled,
        )  # fmt: skip
        trainer = InOrder(model=case.model(), args=arguments, train_dataset=case.data())
        trainer.case = case
        trainer.add_callback(_said(case, trainer))
        trainer.train()
    case.end()


def _said(case: Case, trainer: InOrder) -> object:
    from transformers import TrainerCallback

    class Said(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            case.said(trainer.last)

    return Said()


if __name__ == "__main__":
    main()
