"""Test of whether any file can make a reader fail, and how much of each reader was reached.

    python benchmarks/fuzz.py [--cases 1000] [--bytes-s 20]

`tests/fuzz` damages valid files in many ways for each reader. Each file must be accepted, or
refused in a sentence that names the file, in time and without writing anything. coverage.py follows
the branches of the functions that read, by reader. Then atheris (libFuzzer) searches for bytes that
reach more of the readers that parse bytes themselves, for the given number of seconds each.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import coverage
from recording import save

HERE = Path(__file__).resolve().parent
FUZZ = HERE.parent / "tests" / "fuzz"
WANTED = 0.9
# The messages of libFuzzer at its end, and when it has found something.
_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_EDGES = re.compile(r"cov: (\d+)")
_RAISED = re.compile(r"LawError: .*")


def by_cases(cases: int) -> dict[str, dict[str, Any]]:
    """Run each reader on this many damaged trees; return the branches of its functions reached."""
    followed = coverage.Coverage(
        branch=True, source=["outpace"], data_file=None, config_file=False, messages=False
    )
    followed.start()
    sys.path.insert(0, str(FUZZ))
    from law import LawError, checked, fuzz
    from readers import READERS

    found: dict[str, dict[str, Any]] = {}
    for reader in READERS.values():
        trees = reader.trees()  # the code that creates trees does not read them
        followed.switch_context(reader.name)
        began, broke = time.perf_counter(), None
        try:
            for tree in trees:
                checked(reader, tree)
            tried = len(trees) + fuzz(reader, cases)
        except LawError as error:
            tried, broke = 0, str(error)
        seconds = time.perf_counter() - began
        followed.switch_context("")
        found[reader.name] = {"cases": tried, "seconds": seconds, "failure": broke}
        print(f"{reader.name}: {tried} cases, {seconds:.0f} s, {broke or 'nothing found'}")
    followed.stop()
    for reader in READERS.values():
        found[reader.name] |= _reached(followed, reader)
    return found


def _reached(followed: coverage.Coverage, reader: Any) -> dict[str, Any]:
    """Return the branches of the reader's functions, and those that no case reached."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        followed.json_report(
            outfile=file.name, contexts=[f"^{re.escape(reader.name)}$"],
            include=[f"*/{_path(module)}" for module in reader.code],
        )  # fmt: skip
        files = json.loads(Path(file.name).read_text())["files"]
    branches = covered = 0
    missed = []
    for module, names in reader.code.items():
        of = files[_path(module)]["functions"]
        gone = sorted(set(names) - set(of))
        if gone:
            raise LookupError(f"{reader.name}: {module} does not define {', '.join(gone)}")
        for name, one in of.items():
            if name and (not names or name in names):
                branches += one["summary"]["num_branches"]
                covered += one["summary"]["covered_branches"]
                missed += [f"{module}:{name} {a} → {b}" for a, b in one["missing_branches"]]
    return {"branches": branches, "covered": covered, "missed": missed}


def _path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def by_bytes(seconds: float) -> dict[str, dict[str, Any]]:
    """Run guided by coverage, in one process per reader, since libFuzzer ends its process."""
    sys.path.insert(0, str(HERE))
    from fuzz_bytes import GUIDED

    found = {}
    for name in GUIDED:
        command = [sys.executable, str(HERE / "fuzz_bytes.py"), name, f"{seconds:g}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        runs, edges = _RUNS.search(done.stderr), _EDGES.findall(done.stderr)
        broke = _RAISED.search(done.stdout + done.stderr)
        found[name] = {
            "cases": int(runs[1]) if runs else None,
            "edges": int(edges[-1]) if edges else None,
            "failure": broke[0] if broke else None if done.returncode == 0 else done.stderr[-500:],
        }
        print(name, found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="for each reader")
    parser.add_argument("--bytes-s", type=float, default=20.0, help="of atheris for each reader")
    arguments = parser.parse_args()
    readers = by_cases(arguments.cases)
    guided = by_bytes(arguments.bytes_s) if arguments.bytes_s else {}
    shares = {name: one["covered"] / one["branches"] for name, one in readers.items()}
    result = {
        "readers": readers,
        "guided": guided,
        "cases": sum(one["cases"] for one in readers.values()),
        "least_share_of_branches": min(shares.values()),
        "failures": sum(
            one["failure"] is not None for one in [*readers.values(), *guided.values()]
        ),
    }
    for name, share in shares.items():
        print(f"{name:14} {share:6.1%} of {readers[name]['branches']} branches")
    print("saved", save("fuzz", result))


if __name__ == "__main__":
    main()
