"""torchrun, in a process that has torch imported already; the ranks that it starts are processes of their own."""

from torch.distributed.run import main

main()
