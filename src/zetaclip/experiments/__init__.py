"""The paper's experiments as data, the runner, and the results.

An experiment is a TOML file: rows (methods), columns (data, budgets), what varies, and the
published cells. ``spec`` reads it, ``plan`` turns it into runs of ``zetaclip train``, ``tuning``
chooses learning rates, ``runner`` runs what is missing, ``results`` makes tables, and ``claims``
writes the page that checks each claim of the paper.
"""
