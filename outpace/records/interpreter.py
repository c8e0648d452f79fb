"""Interpreter options for the processes that outpace starts."""

import sys

# Without the current folder in the path, where a data file json.py would be imported.
PYTHON = (sys.executable, "-P")
