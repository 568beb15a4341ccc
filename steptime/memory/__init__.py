"""Bytes of a pipeline stage: states, buckets, activations, overhead."""
