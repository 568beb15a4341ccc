"""Logs and results of finished runs: start-up, GPU memory, scaling; nothing here needs torch."""
