"""Code that runs under torch and is timed or counted: kernels, collectives, one block, whole steps."""
