"""Differentially private PyTorch training whose clipping threshold tunes itself."""

__version__ = "0.1.0"
