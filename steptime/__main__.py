"""`python -m steptime`: the same as `3dtrn`."""

import sys

from steptime.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
