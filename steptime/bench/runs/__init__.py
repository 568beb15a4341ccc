"""What runs under torch and is timed or counted: kernels, collectives, one block, whole steps; counts that need no clock."""
