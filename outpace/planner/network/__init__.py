"""Requirements of a strategy on the network."""
