"""Worlds of processes forked from one that has imported everything: a world costs milliseconds.

    python tests/parallel/forked.py SIZE outpace ARGUMENT …      as if torchrun had started it
    python tests/parallel/forked.py SIZE SCRIPT.py ARGUMENT …

DTensor keeps names of process groups in its caches, so that a process can belong to one world in
its life; and starting Python with torch takes seconds.
"""

import faulthandler
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first use would import, on every rank of every world
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from outpace.cli.main import main as outpace_main
from outpace.jobs.ranks.process_groups import Groups, process_groups
from outpace.records.ranks import Ranks

_TIMEOUT_S = 300.0


def world(size: int, action: Callable[[Groups], Any]) -> list[Any]:
    """As `fork`, in the process groups of a job."""

    def join(ranks: Ranks) -> Any:
        with process_groups(ranks, torch.device("cpu"), _TIMEOUT_S) as groups:
            return action(groups)

    return fork(size, join)


def fork(size: int, action: Callable[[Ranks], Any]) -> list[Any]:
    """What `action` gives on each of `size` ranks. Raises RuntimeError if one of them fails.

    The environment is what torchrun makes. The caller must not have used autograd or threads.
    """
    context = multiprocessing.get_context("fork")
    held = socket.socket()  # no other program is given its port; rank 0 may listen there
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        ranks = Ranks(rank=rank, local_rank=rank, world_size=size, local_world_size=size)
        process = context.Process(target=_rank, args=(ranks, port, action, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found = [_hear(pipe) for pipe in pipes]
    for process in processes:
        process.join()
    held.close()
    failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(found) if error]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [value for _, value in found]


def _hear(pipe: Connection) -> tuple[str | None, Any]:
    try:
        found: tuple[str | None, Any] = pickle.loads(pipe.recv_bytes())
        return found
    except EOFError:
        return "died without a word", None


def _rank(ranks: Ranks, port: int, action: Callable[[Ranks], Any], pipe: Connection) -> None:
    place = {"RANK": ranks.rank, "WORLD_SIZE": ranks.world_size}
    place |= {f"LOCAL_{name}": value for name, value in place.items()}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    faulthandler.enable()  # a rank that a signal ends says where it was
    outcome: tuple[str | None, Any]
    try:
        outcome = (None, action(ranks))
    except BaseException:
        outcome = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(outcome))  # tensors as bytes: shared memory would end with us


def _run(words: list[str], _: Ranks) -> int:
    """The exit code of a command on this rank."""
    if words[0] == "outpace":
        return outpace_main(words[1:])
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
    return 0


def main() -> int:
    try:
        return max(fork(int(sys.argv[1]), partial(_run, sys.argv[2:])))
    except RuntimeError as error:  # with what was raised on the ranks
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
