"""Facts, each with its source: accelerators and model presets. Imports no torch."""
