"""Rates and prediction intervals from measured steps."""
