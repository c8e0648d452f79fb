"""The `outpace` command: call the command's module, and turn errors into exit codes.

Imports nothing heavy, so that `outpace --help` answers immediately.
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
    escape_controls,
    excerpt,
    readable,
    suggest,
)
from outpace.records.signals import ENDING
from outpace.records.version import __version__

# command -> one line of help; its module has the command's name.
COMMANDS = {
    "plan": "predict the fastest ways to train a model on given machines, and why",
    "estimate": "show one plan in detail: time, memory, and whether it fits",
    "accuracy": "find the published steps nearest to a plan, measured and predicted",
    "train": "train a transformer, or resume a run",
    "generate": "continue a text with a trained model",
    "eval": "measure loss and perplexity of a trained model on held-out text",
    "probe": "measure what this machine achieves",
    "calibrate": "correct a machine's rates with the log of a training run on it",
    "topology": "show how devices are connected, and which to use for tensor parallelism",
    "doctor": "find what slows this host down, and what to do about it",
    "memory": "show what uses memory in a training step, and whether it fits",
    "network": "estimate the network bandwidth that a training run needs",
    "watch": "show how busy devices and cores are while something trains",
    "models": "list the models that are known by name, with their sizes",
    "runs": "list past runs, or show one in full",
    "merge": "merge a LoRA adapter into its base model's weights",
    "launch": "write a job for SLURM or Kubernetes",
    "compare": "measure which of several ways to train is faster, beyond the noise",
    "tune": "find the fastest plan for training on this machine by short trials",
    "report": "write a page about a run, comparison, tuning, plan, probe or certificate",
    "verify": "prove that strategies compute what a single process does",
    "version": "show the versions of outpace and its dependencies",
}

_OF_ALL_RANKS = (EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED)
# Commands of other tools, and their counterparts in outpace.
_ELSEWHERE = {
    "export": "the folder model/ of a run is a Hugging Face folder that transformers, vLLM "
    "and others load; `outpace merge` writes one from a LoRA adapter and its base.",
    "convert": "outpace reads Hugging Face folders directly, and the folder model/ of a run "
    "is one.",
    "chat": "outpace generate --run RUN --chat starts a conversation.",
    "infer": "outpace generate --run RUN 'TEXT' continues a text.",
    "evaluate": "outpace eval --run RUN measures a model on held-out data.",
    "finetune": "outpace train --model FOLDER --data FILE continues to train a stored model; "
    "add --lora-rank 16 to train an adapter.",
    "resume": "outpace train --resume DIR continues a run.",
    "benchmark": "`outpace compare` measures which of several ways to train is faster.",
    "presets": "`outpace models` lists them.",
    "init": "`outpace train` needs no project: name --model and --data.",
}

_SIGNALLED = 128  # as in a shell, higher exit codes stand for signals
# Errors caused by the files and folders that the user chose.
_REFUSALS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EISDIR, errno.ENOTDIR,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.EIO,
)  # fmt: skip
# Environment variables that set where libraries keep files.
_PLACES = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_HOME", "CUDA_CACHE_PATH",
    "TORCH_EXTENSIONS_DIR", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "WANDB_DIR", "WANDB_CACHE_DIR",
    "TMPDIR", "TEMP", "TMP",
)  # fmt: skip
_UNWINDING = tuple(one for one in ENDING if one != signal.SIGINT)  # Python handles SIGINT

_HELP = """\
usage: outpace COMMAND [options]

{about}

commands:
{commands}

`outpace train` without options trains a small GPT on Python's source code in a few minutes.
`outpace COMMAND --help` lists a command's options; --json makes any of them print
one JSON document on standard output.
"""


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main`, and exit the process with its exit code.

    If torch is loaded, the process exits before Python tears down its modules: the teardown can
    race with threads of torch's libraries, so that a finished training ends with SIGABRT. After a
    signal, threads are not joined, since one may be in a long library call.
    """
    repair_streams(sys.argv[1:] if argv is None else argv)
    hide_library_warnings()
    code = main(argv)
    stopped = code > _SIGNALLED or code == EXIT_INTERRUPTED
    if "torch" not in sys.modules and not stopped:
        sys.exit(code)
    if not stopped:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does first
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process), and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    environ = dict(os.environ)
    # torch's C++ prints its stack frames for each failed connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    stopped: list[TerminatedError] = []
    end_with_parent(environ)
    try:
        with _raise_on_signals(stopped):
            code = _run(arguments, environ)
            flush_output()  # here, where a closed pipe is still handled
            return code
    except OutpaceError as error:
        same = _fails_on_all_ranks(error)
        return _report_error(str(error), error.exit_code, arguments, environ, same, error.answered)
    except KeyboardInterrupt:
        return _report_error(
            "interrupted", 128 + signal.SIGINT, arguments, environ, on_all_ranks=True
        )
    except BrokenPipeError:
        # The reader of the output has closed it (`outpace … | head`): nobody would see a message.
        drop_output()
        return 128 + signal.SIGPIPE
    except Exception as error:
        if stopped:  # later failures come from unwinding
            return _report_error(str(stopped[0]), stopped[0].exit_code, arguments, environ)
        if reader_is_gone():
            drop_output()
            return 128 + signal.SIGPIPE
        output = output_error()
        if output is not None:
            return _report_error(str(output), output.exit_code, arguments, environ)
        message = (
            _explain_disk_error(error, arguments, environ)
            or _explain_file_error(error, arguments, environ)
            or _explain_home_error(error)
            or _explain_torch_logs_error(error, environ)
        )
        if message is not None:
            return _report_error(message, 2, arguments, environ)
        return _report_error(traceback.format_exc().rstrip(), 1, arguments, environ)


def _run(arguments: list[str], environ: Mapping[str, str]) -> int:
    _require_text(arguments)
    try:
        return _dispatch(arguments, environ)
    except SystemExit as done:  # argparse has printed its help
        return done.code if isinstance(done.code, int) else 0


def _require_text(arguments: Sequence[str]) -> None:
    """Raise BadInputError if UTF-8 cannot encode an argument.

    For `outpace train`, the same holds for the path of the working directory.
    """
    if arguments[:1] == ["train"]:
        with suppress(OSError):  # the folder is gone
            arguments = (*arguments, str(Path.cwd()))
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise BadInputError(
                f"{excerpt(argument)} is not text in this locale's encoding "
                f"({sys.getfilesystemencoding()}). Set LC_ALL=C.UTF-8, or rename it if it is not "
                "in UTF-8."
            ) from None


def _dispatch(arguments: list[str], environ: Mapping[str, str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_format_help(), end="")
        return 0
    name, *rest = arguments
    if name in ("-V", "--version"):
        print(f"outpace {__version__}")
        return 0
    if name in _ELSEWHERE:
        raise BadInputError(f"there is no command {name!r}: {_ELSEWHERE[name]}")
    if name not in COMMANDS:
        raise BadInputError(
            f"there is no command {name!r}.{suggest(name, COMMANDS)} Commands: "
            f"{', '.join(COMMANDS)}. See outpace --help."
        )
    try:
        Path.cwd()
    except OSError as error:
        raise BadInputError(
            f"the directory in which outpace was started no longer exists ({error.strerror}). "
            "Change to another directory."
        ) from None
    module = importlib.import_module(f"outpace.cli.{name}")
    code: int = module.run(rest, environ)
    return code


def _format_help() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return _HELP.format(about=(sys.modules["outpace"].__doc__ or "").strip(), commands=commands)


def _report_error(
    message: str,
    exit_code: int,
    arguments: list[str],
    environ: Mapping[str, str],
    on_all_ranks: bool = False,
    answered: bool = False,
) -> int:
    """Print an error and write it to torchelastic's error file; return the exit code.

    With `--json`, an error document is printed as well, unless the command has printed one already
    (`answered`). An error that occurs `on_all_ranks` is printed by rank 0 only.
    """
    message = readable(message)
    _write_error_file(message, exit_code, environ, answered)
    if is_launched_worker(environ):
        # The launcher reports for all ranks, so each message appears once. It would stop the other
        # ranks at the first nonzero exit code, but some may still be saving.
        return 0 if exit_code == EXIT_INTERRUPTED else exit_code
    from outpace.launch.launchers import rank_name

    rank = rank_name(environ)
    # An error of a single rank is reported only by torchrun, which reads the error file.
    silent = rank != "0" and (on_all_ranks or environ.get("TORCHELASTIC_ERROR_FILE"))
    if not silent and "--handed-over" not in arguments:
        # With --handed-over, outpace.train raises the error.
        who = "" if rank == "0" or message.startswith(f"rank {rank} ") else f"rank {rank}: "
        plain = message.startswith("Traceback ") and not who
        escaped = escape_controls(message)
        print(escaped if plain else f"outpace: {who}{escaped}", file=sys.stderr)
    if "--json" in arguments and rank == "0" and not answered:
        print(json.dumps({"error": message, "exit_code": exit_code}))
    return exit_code


def _fails_on_all_ranks(error: OutpaceError) -> bool:
    """Return whether all ranks fail with this error, so that only one has to report it.

    These are errors that the ranks agree on, and signals, which are sent to all of them.
    """
    return error.on_all_ranks or error.exit_code in _OF_ALL_RANKS or error.exit_code > 128


def end_at_once(
    message: str, exit_code: int, arguments: list[str], environ: Mapping[str, str]
) -> NoReturn:
    """Report the error and end this process, whatever its other threads are doing."""
    code = _report_error(message, exit_code, arguments, environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_launched_worker(environ: Mapping[str, str]) -> bool:
    """Return whether `outpace train --nproc` started this process."""
    return environ.get("TORCHELASTIC_RUN_ID", "").startswith("outpace-")


def _write_error_file(
    message: str, exit_code: int, environ: Mapping[str, str], answered: bool
) -> None:
    """Write the message to the file from which torchelastic reads a rank's error."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    extra = {"timestamp": str(int(now)), "time": now, "exit_code": exit_code,
             "rank": environ.get("RANK", "0"), "answered": answered}  # fmt: skip
    record = {"message": {"message": message, "extraInfo": {"py_callstack": message, **extra}}}
    from outpace.records.base import write_atomic

    # Write it atomically: the launcher reads it as soon as any rank has ended.
    write_atomic(Path(path), json.dumps(record))


def _suggest_location(
    path: object, arguments: Sequence[str], environ: Mapping[str, str], full: bool = False
) -> str:
    """Return advice on how to replace a path that cannot be used.

    The advice is to set the environment variable that contains the path, or else options. If
    `full`, the path's disk is full; otherwise, the path cannot be read or written.
    """
    name = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    given = (word.rpartition("=")[2] for word in arguments)
    if not any(_contains(place, name) for place in given):
        places = [one for one in _PLACES if _contains(environ.get(one, ""), name)]
        if places:
            of = max(places, key=lambda one: len(environ[one]))
            if full:
                return f"set {of} (now {excerpt(environ[of])}) to a folder on another disk"
            return (
                f"{of} = {excerpt(environ[of])} points there: set it to a folder that can be read "
                "and written, or unset it"
            )
    wanted = "on another disk" if full else "that can be read and written"
    return f"choose folders {wanted} with --out and --cache-dir"


def _contains(folder: str, path: str) -> bool:
    return bool(folder and path) and Path(os.path.realpath(path)).is_relative_to(
        os.path.realpath(folder)
    )


def _explain_disk_error(
    error: BaseException | None, arguments: Sequence[str], environ: Mapping[str, str]
) -> str | None:
    """Return a message if the error or one of its causes is a full disk or a file size limit."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" (writing {error.filename})" if error.filename else ""
            return (
                f"the disk is full{where}: {error.strerror}. Free some space, or "
                f"{_suggest_location(error.filename, arguments, environ, full=True)}; --resume "
                "continues a run that has a checkpoint."
            )
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            where = f" {error.filename}" if error.filename else ""
            return (
                f"a file{where} exceeds the allowed size: {error.strerror}. Raise the limit "
                "(ulimit -f), or choose a file system that allows large files with --out and "
                "--cache-dir; --resume continues a run that has a checkpoint."
            )
        error = error.__cause__ or error.__context__
    return None


def _explain_home_error(error: BaseException) -> str | None:
    if not isinstance(error, RuntimeError) or "home directory" not in str(error):
        return None
    return (
        "a path begins with ~, which cannot be expanded: HOME is not set, or there is no such "
        "user. Write the path in full."
    )


def _explain_torch_logs_error(error: BaseException, environ: Mapping[str, str]) -> str | None:
    if not isinstance(error, ValueError) or "log settings" not in str(error):
        return None
    return (
        f"environment: TORCH_LOGS = {excerpt(environ.get('TORCH_LOGS', ''))} is not a valid "
        "setting for torch. Unset it, or see TORCH_LOGS=help python -c 'import torch'."
    )


def _explain_file_error(
    error: BaseException, arguments: Sequence[str], environ: Mapping[str, str]
) -> str | None:
    many = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    if many or os.strerror(errno.EMFILE) in str(error):  # libraries of torch report it as text
        return (
            "too many files are open at once. Raise the limit with ulimit -n, or use fewer "
            "--workers."
        )
    if not isinstance(error, OSError) or error.errno not in _REFUSALS or not error.filename:
        return None
    remedy = _suggest_location(error.filename, arguments, environ)
    return (
        f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}. "
        f"{remedy[0].upper()}{remedy[1:]}."
    )


@contextmanager
def _raise_on_signals(stopped: "list[TerminatedError]") -> Iterator[None]:
    """Raise TerminatedError in this context if a signal other than SIGINT arrives.

    Training later installs a handler of its own. The exception is also added to `stopped`. A signal
    to the process group also ends worker processes, and code that waits for them (such as torch's
    DataLoader) then raises another error; the caller finds the cause in `stopped`.
    """

    def terminate(signum: int, _frame: object) -> NoReturn:
        stopped.append(TerminatedError(f"stopped by {signal.Signals(signum).name}", 128 + signum))
        raise stopped[-1]

    ours = threading.current_thread() is threading.main_thread()
    # Keep existing handlers, and ignored signals (SIGHUP under nohup).
    caught = [one for one in _UNWINDING if ours and signal.getsignal(one) is signal.SIG_DFL]
    for one in caught:
        signal.signal(one, terminate)
    try:
        yield
    finally:
        for one in caught:
            signal.signal(one, signal.SIG_DFL)


class TerminatedError(OutpaceError):
    """A signal ended the command. `exit_code` is 128 + the signal's number, as in a shell."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
