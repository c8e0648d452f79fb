"""Interpreter options for the processes that outpace starts."""

import sys

# -P keeps the current folder off sys.path: a file json.py there would shadow the module.
PYTHON = (sys.executable, "-P")
