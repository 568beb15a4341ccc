"""A plan as a framework's launch file: the keys of the tables that read such files, the other way round."""
