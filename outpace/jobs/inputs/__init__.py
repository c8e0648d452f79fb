"""Inputs of a training run: tokenizers, data, tasks."""
