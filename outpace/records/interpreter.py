"""Interpreter options for the processes that outpace starts."""

import sys

# Without the current folder in the path, since a file json.py there would be imported.
PYTHON = (sys.executable, "-P")
