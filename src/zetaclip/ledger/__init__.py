"""What was released: the ledger of a run, and the journal that is written ahead of it.

``Ledger`` holds a ``Row`` for every release under a ``Header``; ``events()`` is what accountants take.
"""

from ._ledger import Event, Header, Key, Ledger, Row

__all__ = ["Event", "Header", "Key", "Ledger", "Row"]
