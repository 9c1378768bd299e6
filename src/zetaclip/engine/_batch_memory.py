"""Memory that batches are gathered into, used again for later batches."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

# How many tensors hold a storage. Private to torch; without it nothing is used again.
_holders: Any = getattr(torch._C, "_storage_Use_Count", None)
# Smaller batches are not worth it: torch finds memory for them that was used before.
_LEAST_BYTES = 1 << 20
# While a batch is fetched, a loop usually still holds the one before.
_PIECES = 2


class BatchMemory:
    """Gathers rows of one tensor into memory of an earlier batch that nobody holds any more.

    Fresh memory is cleared by the system, page by page, which takes ten times as long as copying
    rows into it.

    **Guarantee.** A batch that is still in use keeps its numbers: memory is used again only if no
    tensor, view, storage, numpy array or autograd graph holds it, and never if it is shared with
    other processes. Bare addresses (``data_ptr``) don't count.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.UntypedStorage, int]] = []  # and its holders when idle

    @staticmethod
    def serves(tensor: Tensor) -> bool:
        """Whether rows of this tensor can be gathered into memory that is used again."""
        return (
            _holders is not None
            and type(tensor) is Tensor
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and not tensor.requires_grad
            and not tensor.is_quantized
            and tensor.nbytes >= _LEAST_BYTES  # a batch of fewer bytes is not worth it
        )

    def select(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """``tensor.index_select(0, rows)``."""
        shape = (len(rows), *tensor.shape[1:])
        size = tensor[:1].numel() * len(rows) * tensor.element_size()
        if size < _LEAST_BYTES:
            return tensor.index_select(0, rows)
        out = tensor.new_empty(0).set_(self._idle(size)).resize_(shape)
        return torch.index_select(tensor, 0, rows, out=out)

    def _idle(self, size: int) -> torch.UntypedStorage:
        """A piece of memory of at least this many bytes that nobody else holds."""
        # Who holds shared memory in other processes is not known.
        self._pieces = [(piece, own) for piece, own in self._pieces if not piece.is_shared()]
        idle = [at for at, (piece, own) in enumerate(self._pieces) if _held(piece) == own]
        for at in idle:
            if self._pieces[at][0].nbytes() >= size:
                return self._pieces[at][0]
        # Room for somewhat larger batches, too: their sizes vary.
        # A multiple of 16 bytes holds whole numbers of every type.
        piece = torch.UntypedStorage((size + size // 8 + 15) // 16 * 16)
        if idle:
            del self._pieces[idle[0]]
        if len(self._pieces) < _PIECES:
            self._pieces.append((piece, _held(piece)))  # counted with its place in the tuple
        return piece


def _held(piece: torch.UntypedStorage) -> int:
    # All that ask a tensor for its storage get this very object.
    return int(_holders(piece._cdata)) + sys.getrefcount(piece)
