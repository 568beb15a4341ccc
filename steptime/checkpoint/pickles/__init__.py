"""A pickle interpreter that executes nothing, and the verdict on the globals of a stream."""
