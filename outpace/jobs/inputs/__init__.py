"""Inputs of a training: tokenizers, data, tasks."""
