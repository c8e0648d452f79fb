"""Frozen, validated records with a JSON form, passed between packages. Does not import torch."""
