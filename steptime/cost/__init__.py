"""The cost of an op: compute, collectives, overlap."""
