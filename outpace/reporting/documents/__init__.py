"""Documents of runs, comparisons, tunings, plans, probes and other records."""
