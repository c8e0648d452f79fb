"""All ten experiments, one after the other, each recorded.

    python benchmarks/seeds/all.py            # about 50 minutes; then python benchmarks/figures.py
    python benchmarks/seeds/all.py --quick    # all small; records nothing

Failures are listed at the end, and do not prevent the others from running.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path


def programs() -> list[Path]:
    """Return the programs in order."""
    return sorted(Path(__file__).parent.glob("s[0-9][0-9]_*.py"))


def main() -> int:
    """Run each in a separate process; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small; nothing is recorded")
    quick = parser.parse_args().quick
    failed = []
    for program in programs():
        began = time.monotonic()
        print(f"── {program.stem}", flush=True)
        done = subprocess.run(
            [sys.executable, str(program), *(["--quick"] if quick else [])], check=False
        )
        print(f"{program.stem}: {time.monotonic() - began:.0f} s", flush=True)
        failed += [program.stem] if done.returncode else []
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
