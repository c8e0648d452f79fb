"""The version of outpace, which is there without metadata of an installation."""

__version__ = "0.1.0"
