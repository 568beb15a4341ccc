"""What an op costs: compute, collectives, overlap."""
