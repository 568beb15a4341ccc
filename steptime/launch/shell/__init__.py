"""Shell scripts, parsed but never run: the launch command that a script ends in."""
