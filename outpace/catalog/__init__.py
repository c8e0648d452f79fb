"""Facts about hardware, software and models, each with its source. Imports no torch."""
