"""Weights -> ζ. Knows nothing of privacy."""
