"""Hide library warnings that the user of a command can do nothing about.

Warnings of outpace are printed as a sentence, and those of the user's code as usual. Log messages
that appear when transformers imports torchao are hidden, too. `python -W …` shows everything.
"""

import logging
import os
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import TextIO

from outpace.nn.torchao import CHATTY_LOGGERS

_OURS = str(Path(__file__).parents[1]) + os.sep
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    {str(Path(_PATHS[name])) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def hide_library_warnings() -> None:
    """Hide warnings of libraries in this process and in processes that are forked from it.

    All warnings are shown if Python's option -W or PYTHONWARNINGS is set.
    """
    if sys.warnoptions:  # -W or PYTHONWARNINGS asks to see all warnings
        return
    warnings.showwarning = _show_warning
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    out = file or sys.stderr
    if filename.startswith(_OURS):
        print(f"outpace: {message}", file=out)
    elif not filename.startswith(_LIBRARIES) and "site-packages" not in Path(filename).parts:
        out.write(warnings.formatwarning(message, category, filename, lineno, line))
