"""Readers of launch scripts, framework configs and logs: each gives the Job that a YAML plan would hold."""
