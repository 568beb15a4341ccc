"""Transformer blocks as lists of ops."""
