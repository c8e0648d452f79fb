"""Network requirements of a strategy."""
