"""Jobs that probe this machine, in one process or on all ranks."""
