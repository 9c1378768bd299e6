"""Thin layers for people who train with something else."""
