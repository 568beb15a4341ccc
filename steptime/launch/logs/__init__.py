"""Training logs: what their lines say, the steady state of a run, and configs printed in them."""
