"""What logs and results of finished runs say: start-up, GPU memory, scaling; nothing here needs torch."""
