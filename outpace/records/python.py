"""How processes of outpace's own are started."""

import sys

# Not with the current folder in the path: data lie there, and a json.py among them would be run.
PYTHON = (sys.executable, "-P")
