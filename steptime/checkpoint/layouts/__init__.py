"""Checkpoint directories of each framework, read into sets of files."""
