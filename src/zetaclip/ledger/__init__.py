"""What was released: the ledger of a run, and its write-ahead journal.

A ``Ledger`` has a ``Header`` and a ``Row`` for every release; its ``events()`` are the input of the
accountants.
"""

from ._ledger import Ledger
from ._rows import Event, Header, Key, Row

__all__ = ["Event", "Header", "Key", "Ledger", "Row"]
