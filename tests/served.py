"""A command or a script, in a process that the tests' fork server made (fixture `command`).

Starting Python with torch takes seconds; a fork of a process that has imported it, milliseconds.
"""

import gc
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def serve(request: Mapping[str, Any]) -> None:
    gc.freeze()  # as after an import of torch: a collection would copy all pages of the server's
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for number, path in ((1, request["out"]), (2, request["err"])):
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    words = request["words"]
    sys.argv = words
    if words[0] == "outpace":
        from outpace.cli.main import command

        command()
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


serve(globals()["request"])  # given by who runs this file
