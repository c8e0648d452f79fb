"""This process's rank, from the environment variables that launchers set."""

import socket
from collections.abc import Mapping

from outpace.launch import slurm_env
from outpace.launch.launchers import HYDRA, LAUNCHERS, PMI, RANK_ALONE, Launcher
from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks

_LAST_PORT = 65535

_SRUN = Launcher("srun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def ranks_from(environ: Mapping[str, str]) -> Ranks | None:
    """Return this process's rank as torchrun, horovodrun, MPI or srun set it; None without one.

    Raises BadInputError if the variables contradict each other, are not numbers, or do not say
    which processes share a host or where the rendezvous is.
    """
    for launcher in LAUNCHERS:
        if environ.get(launcher.rank) or environ.get(launcher.world_size):
            return _read_ranks(launcher, environ)
    of_pmi = environ.get("PMI_SIZE", "1") != "1"
    if of_pmi and environ.get(HYDRA.local_world_size):  # even under srun, which may start Hydra
        return _read_ranks(HYDRA, environ)
    if environ.get("SLURM_STEP_NUM_TASKS"):  # srun sets PMI's variables, too
        of_srun = slurm_env.variables(environ)
        return _read_ranks(_SRUN, of_srun) if of_srun else None
    if of_pmi:
        return _read_ranks(PMI, environ)
    _require_single_process(environ)
    return None


def _require_single_process(environ: Mapping[str, str]) -> None:
    """Raise BadInputError if a launcher set this process's rank, but no number of processes."""
    for name in RANK_ALONE:
        if environ.get(name, "0") != "0":
            raise BadInputError(
                f"environment: {name} = {environ[name]!r}: this is one of several processes, and "
                "each would train separately. Let your launcher start `torchrun` once per host, "
                "or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT for each process."
            )


def init_method(environ: Mapping[str, str]) -> str:
    """Return the `init_method` of torch.distributed: the environment, or srun's first host."""
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return "env://"
    of_srun = slurm_env.variables(environ)
    return f"tcp://{of_srun['MASTER_ADDR']}:{of_srun['MASTER_PORT']}" if of_srun else "env://"


def free_port() -> int:
    """Return a port that is free on this host at the moment."""
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def _read_ranks(launcher: Launcher, environ: Mapping[str, str]) -> Ranks:
    numbers = {
        name: _parse_number(name, environ[name]) for name in launcher.names if environ.get(name)
    }
    for needed in (launcher.rank, launcher.world_size):
        if needed not in numbers:
            raise BadInputError(
                f"the environment has {' and '.join(sorted(numbers))} but not {needed}. "
                f"{launcher.name} sets both {launcher.rank} and {launcher.world_size}; unset them "
                "to train on one process."
            )
    world_size = numbers[launcher.world_size]
    if world_size == 1:  # its only rank is the only one on its host
        numbers = {launcher.local_rank: 0, launcher.local_world_size: 1, **numbers}
    missing = [name for name in launcher.names if name not in numbers]
    if missing:
        raise BadInputError(
            f"the environment has {launcher.rank} and {launcher.world_size} but not "
            f"{' and '.join(missing)}, so it is unknown which of the {world_size} processes "
            f"share a host. Start with torchrun, or set {launcher.local_rank} to the process's "
            f"number on its host and {launcher.local_world_size} to the number of processes "
            "there."
        )
    if world_size > 1:
        _require_master_address(launcher, environ)  # srun always has one
    rank, _, local_rank, local_world_size = (numbers[name] for name in launcher.names)
    return Ranks.parse(
        {
            "rank": rank,
            "world_size": world_size,
            "local_rank": local_rank,
            "local_world_size": local_world_size,
        },
        f"environment ({launcher.rank}, {launcher.world_size}, …)",
    )


def _require_master_address(launcher: Launcher, environ: Mapping[str, str]) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if not missing:
        require_port(environ["MASTER_PORT"])
        return
    how = "as torchrun does"
    if launcher.name == "Open MPI":
        how = "with mpirun -x MASTER_ADDR=… -x MASTER_PORT=29500 …"
    elif launcher in (HYDRA, PMI):
        how = "with mpiexec -genv MASTER_ADDR … -genv MASTER_PORT 29500 …, or exported before it"
    elif launcher.name == "horovodrun":
        how = "before horovodrun, which passes them on"
    raise BadInputError(
        f"the environment has {launcher.rank} but not {' and '.join(missing)}, so the processes "
        f"cannot find each other. Set both, to the host of rank 0 and a free port there, {how}."
    )


def require_port(text: str) -> None:
    """Raise BadInputError for an invalid MASTER_PORT."""
    port = _parse_number("MASTER_PORT", text)
    if not 1 <= port <= _LAST_PORT:
        raise BadInputError(
            f"environment: MASTER_PORT = {text!r} is not a port: ports range from 1 to "
            f"{_LAST_PORT}. Set it to a port that is free on rank 0's host, the same for all "
            "ranks."
        )


def _parse_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadInputError(f"environment: {name} = {text!r} is not a whole number") from None
