"""`outpace watch`."""

import json
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.output import output_file
from outpace.cli.parser import Parser, duration_type
from outpace.records.errors import BadInputError
from outpace.records.line_checksums import strip_checksum
from outpace.records.run import require_run
from outpace.records.units import show_count
from outpace.records.utilisation import Utilisation

if TYPE_CHECKING:
    from outpace.probing.utilisation.sampler import Sampler
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.utilisation import View

_ABOUT = "Show how busy devices and cores are while something trains, with averages at the end."
_EPILOG = (
    "With RUN, watches this host's processes that train in that folder until they end, and saves "
    "the time series there; for a finished run, shows the load that it recorded. With a command "
    "after --, starts the command, watches it until it ends, and exits with its exit code. "
    "Otherwise, press Ctrl-C to stop."
)
_INTERRUPTED = 130
_TAIL_BYTES = 1 << 14


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Watch; return 0, 130 if interrupted before the end of --for, or the command's exit code."""
    at = argv.index("--") if "--" in argv else len(argv)
    words, command = argv[:at], argv[at + 1 :]
    arguments = _parser().read(words)
    _check_arguments(arguments, command, at < len(argv))
    from outpace.probing.utilisation.sampler import Sampler, open_nvml, training_in
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.utilisation import View

    folder: Path | None = arguments.run
    roots = [] if folder is None else training_in(folder / "metrics.jsonl")
    if folder is not None and not roots:
        return _show_recorded(folder, arguments)
    nvml = open_nvml()
    console = Console(stderr=True, highlight=False)
    view = View(console, arguments.every)
    if command:
        from outpace.cli.watched_command import Command

        with Command(command, console, arguments.json) as started:
            sampler = Sampler([started.pid], nvml=nvml)
            watching = _UtilisationWatch(
                sampler, view, arguments.every, output=lambda: started.output
            )
            try:
                started.outlive(watching.sample_until)
            finally:
                view.close()
                _write_result(watching, arguments, console, command=True)
            return started.exit_code
    sampler = Sampler(roots, nvml=nvml)
    progress = (lambda: "") if folder is None else (lambda: _format_latest_step(folder))
    watching = _UtilisationWatch(sampler, view, arguments.every, progress)
    code = 0
    try:
        watching.sample_until(_sleep, arguments.for_s)
    except KeyboardInterrupt:
        code = _INTERRUPTED if arguments.for_s is not None else 0
    finally:
        view.close()
        _write_result(watching, arguments, console)
    return code


def _check_arguments(arguments: Namespace, command: list[str], dashes: bool) -> None:
    if dashes and not command:
        raise BadInputError(
            "outpace watch --: the command is missing. Write it after the two dashes."
        )
    if command and arguments.run is not None:
        raise BadInputError(
            f"both {arguments.run} and a command were given. Watch a run in progress, or start "
            "a command; runs of outpace train record their load themselves."
        )
    if command and arguments.for_s is not None:
        raise BadInputError(
            "--for with a command: the command is watched until it ends. Leave --for out."
        )


class _UtilisationWatch:
    """Loop that samples the utilisation, shows it and records it.

    `progress` returns a line about the watched run, and `output` the command's unfinished line of
    output; both are shown below the table.
    """

    def __init__(
        self,
        sampler: "Sampler",
        view: "View",
        every_s: float,
        progress: Callable[[], str] = lambda: "",
        output: Callable[[], str] = lambda: "",
    ) -> None:
        from outpace.probing.utilisation.recorder import Samples

        self._samples, self._view, self._every_s = Samples(sampler, every_s), view, every_s
        self._progress, self._output = progress, output
        self._began_s = time.monotonic()

    @property
    def utilisation(self) -> Utilisation | None:
        return self._samples.series

    def sample_until(self, wait: Callable[[float], bool], for_s: float | None = None) -> None:
        """Sample until `wait(seconds)` returns true, the run ends, or `for_s` has passed."""
        over = False
        try:
            while not over:
                passed_s = time.monotonic() - self._began_s
                left_s = float("inf") if for_s is None else for_s - passed_s
                over = wait(max(0.0, min(self._every_s - passed_s % self._every_s, left_s)))
                self._sample()
                passed_s = time.monotonic() - self._began_s
                over |= for_s is not None and passed_s >= for_s
                over |= self._samples.sampler.run_ended
        except BaseException:
            self._sample(shown=False)
            raise

    def _sample(self, shown: bool = True) -> None:
        load = self._samples.read_new()
        if shown and load is not None:
            self._view.show(load, self._progress(), self._output())


def _sleep(seconds: float) -> bool:
    """Sleep, and return False, because this watch has no command that could end."""
    time.sleep(seconds)
    return False


def _write_result(
    watching: _UtilisationWatch, arguments: Namespace, console: "Console", command: bool = False
) -> None:
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.utilisation import closing_text

    seen = watching.utilisation
    if seen is None:
        console.print("nothing was recorded, because it ended within a tenth of a second")
        return
    paths = [] if arguments.out_file is None else [arguments.out_file]
    if arguments.run is not None:
        stamp = datetime.fromisoformat(seen.started).strftime("%Y%m%dT%H%M%SZ")
        paths.append(arguments.run / "utilisation" / f"watch-{stamp}.json")
        paths[-1].parent.mkdir(exist_ok=True)
    for path in paths:
        try:
            seen.save(path)
        except OSError as error:
            raise BadInputError(f"cannot write {path}: {error.strerror}") from None
    if arguments.json:
        _print_json([seen])
        return
    # Standard output belongs to the command.
    console = console if command else Console(highlight=False)
    console.print(closing_text(seen, console.width))
    for path in paths:
        console.print(f"written to {path}", style="dim", markup=False, soft_wrap=True)


def _print_json(utilisations: list[Utilisation]) -> None:
    averages = [one.average() for one in utilisations]
    print(
        json.dumps(
            {
                "average": [None if one is None else one.model_dump() for one in averages],
                "series": [one.model_dump() for one in utilisations],
            }
        ),
        flush=True,
    )


def _show_recorded(folder: Path, arguments: Namespace) -> int:
    require_run(folder)
    paths = sorted((folder / "utilisation").glob("host-*.json"))
    if not paths:
        raise BadInputError(
            f"no process on this host trains in {folder}, and no load was recorded there. Run "
            "outpace watch on one of the run's hosts, or leave out the folder to watch the whole "
            "machine."
        )
    seen = [Utilisation.load(path) for path in paths]
    if arguments.json:
        _print_json(seen)
        return 0
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.utilisation import closing_text

    console = Console(highlight=False)
    for path, one in zip(paths, seen, strict=True):
        console.print(f"{path}, recorded from {one.started}", markup=False, soft_wrap=True)
        console.print(closing_text(one, console.width))
    return 0


def _format_latest_step(folder: Path) -> str:
    """Format the last step in a run's log; '' if it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        total = json.loads((folder / "run.json").read_text(encoding="utf-8"))["total_steps"]
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        step = json.loads(strip_checksum(line))
        rate = show_count(step["tokens_per_s"], "tokens/s")
        return f"step {step['step']:,}/{total:,}  loss {step['loss']:.4f}  {rate}"
    return ""


def _parser() -> Parser:
    parser = Parser("watch", _ABOUT, _EPILOG, usage="[RUN] [options] | [options] -- COMMAND …")
    parser.add_json()
    add = parser.option
    add("run", "RUN", Path, "the folder of a run", nargs="?")
    add("--every", "TIME", duration_type(0.2),
        "time between samples: 0.5, 5s, 1m (default: 1 s)", default=1.0)  # fmt: skip
    add("--for", "TIME", duration_type(0.2), "stop after this time: 90, 10m, 1h", dest="for_s")
    add("--out", "FILE.json", output_file, "file to save the time series in", dest="out_file")
    return parser
