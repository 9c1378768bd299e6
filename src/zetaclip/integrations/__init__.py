"""Thin layers for other training frameworks: Lightning, transformers, Opacus, scikit-learn."""
