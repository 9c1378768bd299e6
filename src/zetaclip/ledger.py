"""The ledger: everything that left the data, in the order in which it left.

Every release is one row. Privacy is accounted from these rows and from nothing else, so the ledger is
what a reviewer reads. A run of a million steps is a million rows; they are kept as columns of numbers.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zetaclip._files import atomic_write
from zetaclip.errors import LedgerError
