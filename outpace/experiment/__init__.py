"""Experiments of several runs: compare, tune and verify."""
