"""`python -m mindformers_core`: the command line."""

import sys

from mindformers_core.commands.command_line import main

if __name__ == "__main__":
    sys.exit(main())
