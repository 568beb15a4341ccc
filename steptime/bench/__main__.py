"""`python -m steptime.bench PLAN`, which torchrun starts on every rank: `3dtrn bench PLAN`."""

import sys

from steptime.commands.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
