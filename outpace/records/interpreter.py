"""Interpreter options for the processes that outpace starts."""

import sys

# Not with the current folder in the path: data lie there, and a json.py among them would be run.
PYTHON = (sys.executable, "-P")
