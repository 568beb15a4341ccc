"""A pickle machine that executes nothing, and what the globals of a stream mean."""
