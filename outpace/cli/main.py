"""The `outpace` command: finds the command's module, and turns what it raises into an exit code.

Nothing heavy is imported here: `outpace --help` answers at once.
"""

import atexit
import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from outpace.cli.library_warnings import hide_library_warnings
from outpace.cli.streams import (
    drop_output,
    flush_output,
    output_error,
    reader_is_gone,
    repair_streams,
)
from outpace.launch.parent_watch import end_with_parent
from outpace.records.errors import (
    EXIT_DIVERGED,
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    BadInputError,
    OutpaceError,
    harmless,
    nearest,
    readable,
)
from outpace.records.signals import ENDING
from outpace.records.version import __version__

# command -> one line of help; its module has the command's name.
COMMANDS = {
    "plan": "the fastest ways to train a model on given machines, and why",
    "estimate": "one plan in detail: time, memory, and whether it fits",
    "accuracy": "published steps that are nearest to a plan, measured and predicted",
    "train": "train a transformer, or resume a run",
    "generate": "continue a text with a trained model",
    "eval": "loss and perplexity of a trained model on held-out text",
    "probe": "measure what this machine can really do",
    "calibrate": "correct a machine's rates by what a trainer logged on it",
    "topology": "how devices are joined, and which should hold tensor parallelism",
    "doctor": "what on this host costs speed, and what to do about it",
    "memory": "where memory goes in a training step, and whether it fits",
    "network": "how much network a training needs, and what each would cost it",
    "watch": "how busy devices and cores are while something trains",
    "models": "models that are known by name, with their sizes",
    "runs": "past runs: a list, or one of them in full",
    "merge": "add a LoRA adapter to the weights it was trained beside",
    "launch": "a job for SLURM or Kubernetes that trains there",
    "compare": "which of several ways to train is faster, beyond the noise",
    "tune": "find the fastest plan for a training on this machine, by short trials",
    "report": "a run, comparison, tuning, plan, probe or certificate as one page",
    "verify": "prove that strategies compute what a single process does",
    "version": "versions of outpace and of what it stands on",
}

_OF_ALL_RANKS = (EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED)
# What other tools have a command for, and where it is here.
_ELSEWHERE = {
    "export": "the folder model/ of a run is a Hugging Face folder already, which transformers, "
    "vLLM and others load; outpace merge writes one of a LoRA adapter and its base.",
    "convert": "outpace reads Hugging Face folders as they are, and the folder model/ of a run is "
    "one.",
    "chat": "outpace generate --run RUN --chat begins a conversation.",
    "infer": "outpace generate --run RUN 'TEXT' continues a text.",
    "evaluate": "outpace eval --run RUN measures a model on held-out data.",
    "finetune": "outpace train --model FOLDER --data FILE trains a stored model further; with "
    "--lora-rank 16 an adapter.",
    "resume": "outpace train --resume DIR continues a run.",
    "benchmark": "outpace compare measures which of several ways to train is faster.",
    "presets": "outpace models lists them.",
    "init": "outpace train needs no project: name --model and --data.",
}

_SIGNALLED = 128  # exit codes above it are of signals, as in a shell
# Of files that somebody named, or that lie where somebody said.
_REFUSALS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EISDIR, errno.ENOTDIR,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.EIO,
)  # fmt: skip
_UNWINDING = tuple(one for one in ENDING if one != signal.SIGINT)  # as Python does for that

_HELP = """\
usage: outpace COMMAND [options]

{about}

commands:
{commands}

`outpace train` alone trains a small GPT on Python's own source code, in a few minutes.
`outpace COMMAND --help` lists a command's options; --json makes any of them print
one JSON document on standard output.
"""


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` as a process, to its end.

    With torch it ends before Python takes its modules apart: now and then that met a thread of
    torch's libraries, and a training that had written its result ended by SIGABRT. After a signal
    nobody waits for threads, of which one may be in a long call of a library.
    """
    repair_streams(sys.argv[1:] if argv is None else argv)
    hide_library_warnings()
    code = main(argv)
    stopped = code > _SIGNALLED or code == EXIT_INTERRUPTED
    if "torch" not in sys.modules and not stopped:
        sys.exit(code)
    if not stopped:
        threading._shutdown()  # type: ignore[attr-defined]  # what Python does first itself
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    environ = dict(os.environ)
    # torch's C++ writes frames of its own code for each look at a connection that failed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    stopped: list[TerminatedError] = []
    end_with_parent(environ)
    try:
        with _terminate_like_interrupt(stopped):
            code = _run(arguments, environ)
            flush_output()  # here, where a reader that went away is still caught
            return code
    except OutpaceError as error:
        same = _same_on_all_ranks(error)
        return _fail(str(error), error.exit_code, arguments, environ, same)
    except KeyboardInterrupt:
        return _fail("interrupted", 128 + signal.SIGINT, arguments, environ, on_all_ranks=True)
    except BrokenPipeError:
        # Whoever read our output has closed it (`outpace … | head`): nobody is left to tell.
        drop_output()
        return 128 + signal.SIGPIPE
    except Exception as error:
        if stopped:  # what failed since then is only the clearing up
            return _fail(str(stopped[0]), stopped[0].exit_code, arguments, environ)
        if reader_is_gone():
            drop_output()
            return 128 + signal.SIGPIPE
        output = output_error()
        if output is not None:
            return _fail(str(output), output.exit_code, arguments, environ)
        message = _disk_sentence(error) or _file_sentence(error) or _home_sentence(error)
        if message is not None:
            return _fail(message, 2, arguments, environ)
        return _fail(traceback.format_exc().rstrip(), 1, arguments, environ)


def _run(arguments: list[str], environ: Mapping[str, str]) -> int:
    try:
        return _dispatch(arguments, environ)
    except SystemExit as done:  # argparse has printed its help
        return done.code if isinstance(done.code, int) else 0


def _dispatch(arguments: list[str], environ: Mapping[str, str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    name, *rest = arguments
    if name in ("-V", "--version"):
        print(f"outpace {__version__}")
        return 0
    if name in _ELSEWHERE:
        raise BadInputError(f"there is no command {name!r}: {_ELSEWHERE[name]}")
    if name not in COMMANDS:
        raise BadInputError(
            f"there is no command {name!r}.{nearest(name, COMMANDS)} "
            f"The commands are {', '.join(COMMANDS)}; see outpace --help."
        )
    try:
        Path.cwd()
    except OSError as error:
        raise BadInputError(
            f"the directory that outpace was started in is gone ({error.strerror}). Change to "
            "another one."
        ) from None
    module = importlib.import_module(f"outpace.cli.{name}")
    code: int = module.run(rest, environ)
    return code


def _help() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return _HELP.format(about=(sys.modules["outpace"].__doc__ or "").strip(), commands=commands)


def _fail(
    message: str,
    exit_code: int,
    arguments: list[str],
    environ: Mapping[str, str],
    on_all_ranks: bool = False,
) -> int:
    """Tell the user, and `--json`'s reader, what went wrong. Returns the exit code to end with.

    What is the same `on_all_ranks` is said by rank 0 alone.
    """
    message = readable(message)
    _write_error_file(message, exit_code, environ)
    if is_launched_worker(environ):
        # The launcher speaks for all ranks, so that a person reads each message once. It would
        # stop the other ranks at the first exit code that is not 0: those still saving must not be.
        return 0 if exit_code == EXIT_INTERRUPTED else exit_code
    from outpace.launch.launchers import rank_name

    rank = rank_name(environ)
    # What only one rank fails at nobody else says, but torchrun, of what is in the error file.
    silent = rank != "0" and (on_all_ranks or environ.get("TORCHELASTIC_ERROR_FILE"))
    if not silent and "--handed-over" not in arguments:
        # With --handed-over outpace.train raises it.
        who = "" if rank == "0" or message.startswith(f"rank {rank} ") else f"rank {rank}: "
        plain = message.startswith("Traceback ") and not who
        said = harmless(message)
        print(said if plain else f"outpace: {who}{said}", file=sys.stderr)
    if "--json" in arguments and rank == "0":
        print(json.dumps({"error": message, "exit_code": exit_code}))
    return exit_code


def _same_on_all_ranks(error: OutpaceError) -> bool:
    """Whether rank 0 says the same: all agreed on it, or a signal went to all."""
    return error.on_all_ranks or error.exit_code in _OF_ALL_RANKS or error.exit_code > 128


def end_at_once(
    message: str, exit_code: int, arguments: list[str], environ: Mapping[str, str]
) -> NoReturn:
    """Tell what went wrong and end this process, whatever its other threads are at."""
    code = _fail(message, exit_code, arguments, environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_launched_worker(environ: Mapping[str, str]) -> bool:
    """Whether this process is a worker that `outpace train --nproc` started."""
    return environ.get("TORCHELASTIC_RUN_ID", "").startswith("outpace-")


def _write_error_file(message: str, exit_code: int, environ: Mapping[str, str]) -> None:
    """Leave the message where torch's elastic launcher looks for the first failure's cause."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    extra = {"timestamp": str(int(now)), "time": now, "exit_code": exit_code,
             "rank": environ.get("RANK", "0")}  # fmt: skip
    record = {"message": {"message": message, "extraInfo": {"py_callstack": message, **extra}}}
    from outpace.records.base import write_atomic

    # Whole or not at all: the launcher looks as soon as one rank has ended, and may see this one's.
    write_atomic(Path(path), json.dumps(record))


def _disk_sentence(error: BaseException | None) -> str | None:
    """A sentence when the error, or what caused it, is a full disk or a limit; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" (writing {error.filename})" if error.filename else ""
            return (
                f"the disk is full{where}: {error.strerror}. Free some space, or choose other "
                "places with --out and --cache-dir; --resume continues a run with a checkpoint."
            )
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            where = f" {error.filename}" if error.filename else ""
            return (
                f"a file{where} may not become as large as it has to: {error.strerror}. Raise the "
                "limit (ulimit -f), or choose a file system that takes large files with --out and "
                "--cache-dir; --resume continues a run with a checkpoint."
            )
        error = error.__cause__ or error.__context__
    return None


def _home_sentence(error: BaseException) -> str | None:
    """A sentence when a path begins with ~, and this host knows no such home; else None."""
    if not isinstance(error, RuntimeError) or "home directory" not in str(error):
        return None
    return (
        "a path begins with ~, and this host knows no such home: HOME is not set, or there is no "
        "such user. Write the path in full."
    )


def _file_sentence(error: BaseException) -> str | None:
    """A sentence where the system refused a file, or another one; else None."""
    many = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    if many or os.strerror(errno.EMFILE) in str(error):  # so say libraries of torch's
        return (
            "too many files are open at once. Allow more of them with ulimit -n, or use fewer "
            "--workers."
        )
    if not isinstance(error, OSError) or error.errno not in _REFUSALS or not error.filename:
        return None
    return (
        f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}. Name a place that can be "
        "read and written, with --out and --cache-dir."
    )


@contextmanager
def _terminate_like_interrupt(stopped: "list[TerminatedError]") -> Iterator[None]:
    """Let these unwind the program as Ctrl-C does, until training installs its own handler.

    What is raised is put into `stopped`, too: a signal to the whole process group ends helpers as
    well, and what misses them may raise errors of its own (torch's DataLoader does, anywhere).
    """

    def terminate(signum: int, _frame: object) -> NoReturn:
        stopped.append(TerminatedError(f"stopped by {signal.Signals(signum).name}", 128 + signum))
        raise stopped[-1]

    ours = threading.current_thread() is threading.main_thread()
    # Nobody else's handlers, and nothing that is ignored (SIGHUP, under nohup).
    caught = [one for one in _UNWINDING if ours and signal.getsignal(one) is signal.SIG_DFL]
    for one in caught:
        signal.signal(one, terminate)
    try:
        yield
    finally:
        for one in caught:
            signal.signal(one, signal.SIG_DFL)


class TerminatedError(OutpaceError):
    """A signal ended the command. `exit_code` is 128 + its number, as in a shell."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
