"""Shell scripts read, never run: the launch command that a script ends in."""
