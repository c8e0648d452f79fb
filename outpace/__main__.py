"""Entry point of `python -m outpace`, which is the same as the command `outpace`."""

import os
import sys
from pathlib import Path


def ignore_working_directory() -> None:
    """Remove the working directory, which `-m` adds, from the import path.

    Otherwise, a file there, such as a user's tokenizers.py, could shadow a library. A checkout of
    outpace stays on the path.
    """
    first = Path(sys.path[0] or os.curdir)
    if sys.flags.safe_path or not first.is_dir() or not first.samefile(os.curdir):
        return
    if not (first / "outpace" / "__main__.py").is_file():
        del sys.path[0]


if __name__ == "__main__":
    ignore_working_directory()
    from outpace.cli.main import command

    command()
