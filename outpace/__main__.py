"""`python -m outpace` is `outpace`."""

from outpace.cli.main import command

if __name__ == "__main__":
    command()
