"""The version of outpace, available without the metadata of an installation."""

__version__ = "0.1.0"
