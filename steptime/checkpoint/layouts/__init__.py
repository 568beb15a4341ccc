"""Sets of files: how each framework lays a checkpoint out over a directory."""
