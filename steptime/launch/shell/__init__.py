"""Shell scripts, parsed but never run: the launch command of a script."""
