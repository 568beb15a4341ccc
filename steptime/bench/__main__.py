"""`python -m steptime.bench CONFIG`, which torchrun starts on every rank: `3dtrn bench CONFIG`."""

import sys

from steptime.commands.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
