"""`python -m mindformers_core`: the command line of `mindformers_core.trainer`."""

import sys

from mindformers_core.trainer.command_line import main

if __name__ == "__main__":
    sys.exit(main())
