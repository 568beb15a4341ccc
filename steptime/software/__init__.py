"""What a framework does: profiles, recipes, recomputation, fitted efficiency, calibration."""
