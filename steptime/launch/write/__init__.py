"""A plan as a framework's launch file: the inverse of the tables that read such files."""
