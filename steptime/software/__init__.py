"""Frameworks: profiles, recipes, recomputation, fitted efficiency, calibration."""
