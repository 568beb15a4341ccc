"""Profiler traces read and sorted into the parts of an estimate; nothing here needs torch."""
