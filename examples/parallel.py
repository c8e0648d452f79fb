"""The script of plain.py on any number of processes. What is different ends with `# outpace`.

torchrun --nproc-per-node 2 examples/parallel.py --strategy zero3
"""

import argparse  # outpace
import os  # outpace

import torch
import torch.distributed as dist  # outpace
from plain import batches, build, mean_loss

import outpace  # outpace


def plan() -> outpace.Plan:  # outpace
    """Which strategy, on which axis: all there is to change."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp", choices=("ddp", "zero3", "gpipe", "1f1b"))
    strategy, size = parser.parse_args().strategy, int(os.environ["WORLD_SIZE"])
    if strategy in ("gpipe", "1f1b"):
        return outpace.Plan(strategy=strategy, pp=size, micro_batch=32 // 4, pp_microbatches=4)
    axis = "dp_shard" if strategy == "zero3" else "dp_replicate"
    return outpace.Plan(strategy=strategy, micro_batch=32 // size, **{axis: size})


def main() -> None:
    torch.manual_seed(0)
    model = outpace.parallelize(build(), plan(), loss=mean_loss)  # outpace
    optimizer = model.make_optimizer(torch.optim.AdamW, lr=3e-3)  # outpace
    for step, batch in enumerate(batches(20), 1):
        loss = model.forward_backward(model.share(batch))  # outpace
        model.clip_grad_norm(1.0)  # outpace
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:  # outpace
            print(f"step {step}  loss {loss:.5f}")
    state = model.state_dict()  # outpace
    if dist.get_rank() == 0:  # outpace
        torch.save(state, "model.pt")  # outpace
    dist.destroy_process_group()  # outpace


if __name__ == "__main__":
    main()
