"""Checkpoint summaries without torch: formats, shapes, integrity and architecture from headers only."""

from steptime.checkpoint.api import Summary, summarize_checkpoint

__all__ = ["Summary", "summarize_checkpoint"]
