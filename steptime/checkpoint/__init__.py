"""Checkpoint summaries without torch: formats, shapes, integrity and architecture from headers alone."""

from steptime.checkpoint.api import summarize_checkpoint
from steptime.checkpoint.summary import Summary

__all__ = ["Summary", "summarize_checkpoint"]
