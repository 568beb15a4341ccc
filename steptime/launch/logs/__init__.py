"""Training logs: the meaning of their lines, the steady state of a run, and configs printed in them."""
