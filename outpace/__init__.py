"""outpace: predict the fastest way to train a transformer, prove it, and train with it."""

__version__ = "0.1.0"
