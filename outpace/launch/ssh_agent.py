"""Agent that runs the ranks of one host; `launch.ssh` starts it over ssh.

    python -m outpace.launch.ssh_agent check   read a HostQuery, and print HostFacts
    python -m outpace.launch.ssh_agent run     read a HostCommand, and run its ranks

Input is one line of JSON on standard input. While ranks run, each further line names a signal for
them, or is empty, which is a heartbeat. If the input ends, or is silent for SILENCE_S, the ranks
get SIGTERM. The last line of output begins with MARK and says how the ranks ended.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import psutil

from outpace.launch.launcher_env import free_port
from outpace.launch.network_interfaces import variables_for
from outpace.probing.hardware.versions import versions
from outpace.records.errors import OutpaceError
from outpace.records.hosts import HostCommand, HostFacts, HostQuery

MARK = "outpace-agent: "
SILENCE_S = 60.0  # a host that is lost does not close its connection
_AT_ONCE_S = 15.0  # time for the ranks to end after a second signal
_GRACE_S = 60.0  # time for ranks to save if nobody waits for them


def main(argv: list[str]) -> int:
    """Run the agent's command, `argv`, and return the exit code.

    The first line of standard input is the command's request, in JSON.
    """
    line = sys.stdin.readline()
    if argv == ["check"]:
        print(MARK + check(HostQuery.parse(json.loads(line), "question")).model_dump_json())
    else:
        run(HostCommand.parse(json.loads(line), "work"))
    return 0


def check(asked: HostQuery) -> HostFacts:
    """Return this host's facts: versions, clock, missing paths, a free port, leftover ranks."""
    now_s = time.time()
    client, _, server, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    folder = Path(asked.folder)
    paths = {path: folder / path for path in asked.seen}
    return HostFacts(
        versions=versions(),
        time_s=now_s,
        address=server or None,
        asked_from=client or None,
        unseen=tuple(path for path, whole in paths.items() if not whole.exists()),
        port=free_port(),
        left=tuple(_find_rank_processes(asked.earlier)) if asked.earlier else (),
    )


def _find_rank_processes(run_ids: Sequence[str]) -> Iterator[int]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if "RANK" in environment and environment.get("TORCHELASTIC_RUN_ID") in run_ids:
                yield process.pid


def run(work: HostCommand) -> NoReturn:
    """Run this host's ranks, and print how they ended."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    from outpace.launch import local

    os.chdir(work.folder)
    os.environ.update(work.environment)
    os.environ.update(variables_for(work.address, os.environ))
    threading.Thread(target=_forward_signals, daemon=True).start()
    rendezvous = local.HostRendezvous(
        work.nodes, work.node, work.endpoint, work.run_id, work.address
    )
    error = None
    ended = local.RanksEnd({}, [], [])
    try:
        ended = local.run_ranks(work.slots, list(work.command), host_rendezvous=rendezvous)
    except local.WorkerError as found:  # a signal arrived before the ranks started
        error, ended = str(found), local.RanksEnd({}, [], [found.exit_code - 128])
    except OutpaceError as found:
        error = str(found)
    except RendezvousConnectionError as found:
        error = str(found)
    except Exception as found:  # a rendezvous failure, with torch's message
        error = f"{type(found).__name__}: {found}"
    _report_and_exit({**asdict(ended), "error": error})


def _report_and_exit(outcome: dict[str, Any]) -> NoReturn:
    """Print how the ranks ended, and exit without waiting for the thread that reads input."""
    sys.stdout.flush()
    print("\n" + MARK + json.dumps(outcome), flush=True)  # a dead rank may have left half a line
    sys.stderr.flush()
    os._exit(0)


def _forward_signals() -> None:
    """Send the signals named on standard input to this process, which passes them to its ranks."""
    told = 0
    for line in _read_lines():
        with suppress(KeyError):
            os.kill(os.getpid(), signal.Signals[line.strip()])
            told += 1
        if told == 2:
            break
    else:
        if told == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os.kill(os.getpid(), signal.SIGTERM)
    # A second signal ends ranks immediately, but torch's agent may wait for an unreachable host.
    time.sleep(_AT_ONCE_S)
    for rank in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            rank.kill()
    _report_and_exit(
        {"failures": {}, "reports": [], "signals": [], "error": "its ranks had to be killed"}
    )


def _read_lines() -> Iterator[str]:
    """Yield the lines of standard input as they arrive, until SILENCE_S pass without one."""
    lines: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    with suppress(Empty):
        while (line := lines.get(timeout=SILENCE_S)) is not None:
            yield line


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
