"""Python programs and functions that return configs, read by their syntax and never run."""
