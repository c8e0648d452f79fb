"""One module per command. Only this package reads argv and the environment."""
