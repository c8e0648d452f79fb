"""DeepSpeed's engine: ZeRO-1, ZeRO-3, or ZeRO-3 with offloaded optimizer state."""

import deepspeed
from common import asked
from torch.utils.data import DataLoader


def main() -> None:
    """Train on `case`."""
    case, flags = asked("zero3", "offload")
    deepspeed.init_distributed("gloo")
    zero: dict = {"stage": 3 if flags.zero3 else 1}
    if flags.offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    settings = {
        "train_batch_size": case.batch, "train_micro_batch_size_per_gpu": case.share,
        "bf16": {"enabled": case.bf16}, "gradient_clipping": case.clip, "zero_optimization": zero,
        "steps_per_print": 10**9, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True, "communication_data_type": "fp32",
    }  # fmt: skip
    model = case.model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=case.optimizer(model), config=settings)
    for batch in DataLoader(case.data(), batch_size=case.share, sampler=case.order()):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        case.said(loss.detach())
    case.end()


if __name__ == "__main__":
    main()
