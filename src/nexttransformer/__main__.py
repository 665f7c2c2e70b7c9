"""`python -m nexttransformer` and the console script."""

from nexttransformer import cli
from nexttransformer.errors import run_command


def main() -> None:
    """Runs the command line and exits the process with its code."""
    run_command(cli.main)


if __name__ == "__main__":
    main()
