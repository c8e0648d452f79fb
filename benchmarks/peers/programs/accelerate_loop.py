"""A manual loop with accelerate, as its guide shows."""

from accelerate import Accelerator
from common import asked
from torch.utils.data import DataLoader


def main() -> None:
    """Train on `case`."""
    case, flags = asked("compile")
    more = {"dynamo_backend": "inductor"} if flags.compile else {}
    accelerator = Accelerator(mixed_precision="bf16" if case.bf16 else "no", cpu=True, **more)
    model = case.model()
    optimizer = case.optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    # The sampler already has this rank's samples.
    loader = DataLoader(case.data(), batch_size=case.share, sampler=case.order())
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        case.said(loss.detach())
    case.end()


if __name__ == "__main__":
    main()
