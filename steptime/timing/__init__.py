"""Seconds of a step: parts, pipeline, data parallelism, optimizer."""
