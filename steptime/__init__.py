"""steptime: how long a transformer training step takes, and whether it fits."""

__version__ = "0.1.0"
