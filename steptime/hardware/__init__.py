"""Machines: an accelerator and the network around it."""
