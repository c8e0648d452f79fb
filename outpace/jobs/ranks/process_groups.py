"""Process groups of a job, and actions that one rank performs for all."""

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _abort_process_group, _world
from torch.distributed.rendezvous import rendezvous

from outpace.jobs.ranks.session import Session, agree_on_session
from outpace.launch.job_identity import is_restarted, job_identity
from outpace.launch.launcher_env import init_method
from outpace.launch.network_interfaces import LOOPBACK, listen, require_interfaces, use_interface
from outpace.launch.rendezvous import store_on
from outpace.parallel.gloo_shutdown import register_gloo_shutdown
from outpace.parallel.rank_objects import gather_objects
from outpace.records.errors import BadInputError, OutpaceError
from outpace.records.ranks import Ranks

Result = TypeVar("Result")
_PATIENCE = timedelta(hours=6)
# Torch's own time limits should expire first, where torch observes them.
_MARGIN_S = 10.0
_LOOK_AGAIN_S = 0.1
_MISSING_RANK = re.compile(r"wait timeout after .*/(\d+)$")  # torch's store, about a missing key


@dataclass(frozen=True)
class Fact:
    """A value that must be equal on all ranks, and what to do if it is not."""

    value: object
    remedy: str


@dataclass(frozen=True)
class Groups:
    """Process groups of a job, created and destroyed by `process_groups`.

    `control` carries the small messages in host memory that steps send, `saving` those of
    checkpoints. `patient` and `saving` have a long time limit, for work that rank 0 does alone on a
    slow disk; if a rank dies, the others stop waiting immediately. `store`: the entries of the
    rendezvous store that only these ranks use. `shared`: the whole store, which processes of other
    jobs may use by mistake. `variables`: environment variables set while the groups exist.
    `session`: None for a single process.
    """

    ranks: Ranks
    store: Store
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    patient: dist.ProcessGroup
    variables: frozenset[str] = frozenset()
    session: Session | None = None
    shared: Store | None = None

    def run_on_rank_0(self, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0; return its result, or raise its OutpaceError, on all ranks."""
        outcome: list[object] = [None, None]
        if self.ranks.rank == 0:
            try:
                outcome[0] = action()
            except OutpaceError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, 0, group=self.patient)
        if isinstance(outcome[1], OutpaceError):
            outcome[1].on_all_ranks = True
            raise outcome[1]
        return outcome[0]  # type: ignore[return-value]

    def wait_for_all(self) -> None:
        """Wait until every rank has arrived, however long that takes. Collective."""
        dist.barrier(self.patient)

    def require_one_job(self) -> None:
        """Raise BadInputError if more processes joined than there are ranks. Collective."""
        if self.session is not None and self.shared is not None:
            self.run_on_rank_0(partial(self.session.require_no_surplus, self.shared))

    def require_same(self, facts: Mapping[str, Fact]) -> None:
        """Raise BadInputError on all ranks if a rank's facts differ from rank 0's. Collective.

        A rank without facts, other than rank 0, is not compared. Facts are sent only if their
        digests differ.
        """
        values = repr({what: fact.value for what, fact in facts.items()})
        digest = hashlib.blake2b(values.encode(), digest_size=16).digest() if facts else None
        digests = gather_objects(digest, self.patient)
        if all(other in (None, digests[0]) for other in digests):
            return
        said = gather_objects((socket.gethostname(), dict(facts)), self.patient)
        first_host, first = said[0]
        none = Fact(None, "Install one version of outpace on all hosts.")
        for rank, (host, other) in enumerate(said):
            for what in {**first, **other} if other else ():
                value, found = first.get(what, none).value, other.get(what, none)
                if repr(found.value) != repr(value):
                    error = BadInputError(
                        f"rank {rank} (on {host}) has a different {what} from rank 0 (on "
                        f"{first_host}): {found.value} instead of {value}. {found.remedy}"
                    )
                    error.on_all_ranks = True
                    raise error


def resolve_backend(asked: Literal["auto", "gloo", "nccl", "mpi"], device: torch.device) -> str:
    """Return torch's name for the communication backend. Raises BadInputError if not available.

    The default is NCCL between CUDA devices and gloo between CPU processes. Host messages use gloo.
    """
    on_cuda = device.type == "cuda"
    if asked == "nccl" and not on_cuda:
        raise BadInputError(
            f"--backend nccl transfers tensors of CUDA devices, but the device is {device.type}. "
            "Use --backend gloo."
        )
    if asked == "nccl" and not dist.is_nccl_available():
        raise BadInputError("--backend nccl: this torch has no NCCL. Use --backend gloo.")
    if asked == "mpi" and not dist.is_mpi_available():
        raise BadInputError(
            "--backend mpi: this torch was built without MPI, as pip packages are. Build torch "
            f"from source with MPI installed, or use --backend {'nccl' if on_cuda else 'gloo'}, "
            "which mpirun can start, too."
        )
    if asked == "auto":
        asked = "nccl" if on_cuda and dist.is_nccl_available() else "gloo"
    return "cpu:gloo,cuda:nccl" if asked == "nccl" else asked


def _create_default_group(
    backend: str, store: Store, ranks: Ranks, timeout: timedelta, device: torch.device
) -> None:
    """Create the default process group.

    NCCL is given the device, so that it connects now rather than in the first collective, and can
    split subgroups from this group. Raises BadInputError if MPI reports another rank or number of
    ranks.
    """
    if backend != "mpi":
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            device_id=device if "nccl" in backend else None,
        )
        return
    dist.init_process_group("mpi", timeout=timeout)
    found = Ranks(rank=dist.get_rank(), world_size=dist.get_world_size())
    if (found.rank, found.world_size) != (ranks.rank, ranks.world_size):
        raise BadInputError(
            f"--backend mpi: according to MPI, this is rank {found.rank} of {found.world_size}; "
            f"according to the environment, {ranks.rank} of {ranks.world_size}. Start all "
            "processes with one mpirun."
        )
    # With MPI, torch's store is an empty placeholder; the gloo groups need this one.
    everyone = dist.group.WORLD
    _world.pg_map[everyone] = ("mpi", store)  # type: ignore[index]


def _destroy_groups(backend: str, failure: type[BaseException] | None, *_: object) -> None:
    """Destroy all groups; after a failure, abort NCCL's, which would wait for lost messages."""
    if failure is not None and "nccl" in backend:
        _abort_process_group()  # destroy_process_group would wait
    else:
        dist.destroy_process_group()


def _open_store(ranks: Ranks, timeout: timedelta, several_hosts: bool) -> Store:
    """Return the rendezvous store: the launcher's, or one that rank 0 serves.

    Rank 0 listens only on the address to which other ranks resolve MASTER_ADDR, if it is known.
    Raises BadInputError if another program uses the port, and OutpaceError if the ranks do not
    connect within `timeout`.
    """
    url = init_method(os.environ)
    host, port = _parse_address(url)
    waited_s = _wait_for_host_name(host, timeout.total_seconds())

    def connect() -> Store:
        if ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # A port in use belongs to these ranks' earlier groups, and torch shares it, or to
            # another process, and torch reports it.
            with suppress(OSError):
                bound = listen(host, port, several_hosts)
                if bound is not None:
                    return store_on(bound, host, timeout)
        found: Store = next(rendezvous(url, ranks.rank, ranks.world_size, timeout=timeout))[0]
        return found

    return _run_within_timeout(connect, ranks, timeout, waited_s)


def _wait_for_host_name(host: str, limit_s: float) -> float:
    """Wait until a host name resolves (a pod may still be starting); return the seconds waited.

    Raises BadInputError if it does not resolve within the limit.
    """
    began_s = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() - began_s >= limit_s:
                raise BadInputError(
                    f"environment: MASTER_ADDR = {host!r} does not resolve on this host after "
                    f"{limit_s:.0f} s ({getattr(error, 'strerror', None) or error}). Set it to a "
                    "name or address of rank 0's host that this host can resolve."
                ) from None
        else:
            return time.monotonic() - began_s
        time.sleep(_LOOK_AGAIN_S)


def _run_within_timeout(
    action: Callable[[], Result], ranks: Ranks, timeout: timedelta, waited_s: float = 0.0
) -> Result:
    """Run an action that needs all ranks. Raises OutpaceError if they do not join within `timeout`.

    The action runs in a thread, since torch's store blocks signals and waits forever for a server
    that does not answer.
    """
    outcome: list[Result] = []
    errors: list[BaseException] = []

    def act() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act, name="rendezvous", daemon=True)
    thread.start()
    until_s = time.monotonic() + max(timeout.total_seconds() - waited_s, 0.0) + _MARGIN_S
    while thread.is_alive() and time.monotonic() < until_s:
        thread.join(_LOOK_AGAIN_S)
    if errors and isinstance(errors[0], RuntimeError):  # raised by gloo, or as torch's DistError
        raise _explain_failed_rendezvous(errors[0], ranks, timeout) from None
    if errors:
        raise errors[0]
    if not outcome:
        silence = TimeoutError("the process listening there does not answer as rank 0 would")
        raise _explain_failed_rendezvous(silence, ranks, timeout)
    return outcome[0]


def _explain_failed_rendezvous(error: Exception, ranks: Ranks, timeout: timedelta) -> Exception:
    if ranks.world_size == 1:
        return error
    host, port = _parse_address(init_method(os.environ))
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return BadInputError(
            f"the ranks cannot use {host}, port {port} for their rendezvous: another program "
            "listens there. Start them with another MASTER_PORT."
        )
    why = next(iter(str(error).strip().splitlines()), type(error).__name__)
    missing = _MISSING_RANK.search(why)
    if missing is not None:
        why = f"rank {missing[1]} did not join"
    elif "Ping failed" in why:  # torch's message lists bytes as numbers
        why = "another program listens there"
    return OutpaceError(
        f"rank {ranks.rank} did not find the others at {host}, port {port} within "
        f"{timeout.total_seconds():.0f} s ({why}). Check that all {ranks.world_size} were "
        "started, and that this host and port are reachable from here."
    )


def _parse_address(url: str) -> tuple[str, int]:
    if url == "env://":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@contextmanager
def process_groups(
    ranks: Ranks, device: torch.device, timeout_s: float, backend: str | None = None
) -> Iterator[Groups]:
    """Create the job's process groups, and destroy them at the end.

    `backend`: from `resolve_backend`. A single process gets groups too, so it is no special case.
    Ranks use new keys each time they join, since the store may still hold earlier ones.
    """
    if dist.is_initialized():
        raise BadInputError(
            "torch.distributed is already initialized in this process, but outpace creates its "
            "own process group. Call outpace.train before init_process_group, or in another "
            "process."
        )
    require_interfaces(os.environ)
    timeout = timedelta(seconds=timeout_s)
    backend = backend or resolve_backend("auto", device)
    session: Session | None
    shared: Store | None
    store: Store
    several_hosts = ranks.world_size > ranks.local_world_size
    if ranks.world_size == 1:
        session, shared, store = None, None, HashStore()
        backend = "gloo"
    else:
        shared = _open_store(ranks, timeout, several_hosts)
        job, restarted = job_identity(os.environ), is_restarted(os.environ)
        agree = partial(agree_on_session, shared, ranks, timeout_s, job, restarted)
        session = _run_within_timeout(agree, ranks, timeout)
        store = PrefixStore(f"outpace-{session.name}", shared)
    with ExitStack() as stack:
        own = frozenset[str]() if several_hosts else stack.enter_context(use_interface(LOOPBACK))
        _run_within_timeout(
            partial(_create_default_group, backend, store, ranks, timeout, device), ranks, timeout
        )
        register_gloo_shutdown()
        stack.push(partial(_destroy_groups, backend))

        def make_groups() -> Groups:
            patience = max(timeout, _PATIENCE)
            return Groups(
                ranks,
                store=store,
                control=dist.new_group(backend="gloo", timeout=timeout, group_desc="control"),
                saving=dist.new_group(backend="gloo", timeout=patience, group_desc="saving"),
                patient=dist.new_group(backend="gloo", timeout=patience, group_desc="patient"),
                variables=own,
                session=session,
                shared=shared,
            )

        yield _run_within_timeout(make_groups, ranks, timeout)
