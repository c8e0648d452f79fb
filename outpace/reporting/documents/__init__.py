"""HTML documents of runs, comparisons, tunings, plans and probes."""
