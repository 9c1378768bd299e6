"""Where the secret streams of a run come from."""

from __future__ import annotations

import secrets
from dataclasses import replace

from ..randomness import Stream
from ._state import RunState


class Seed:
    """The operating system, or a number that the user fixed for tests and public data.

    **Guarantee.** Without a number nobody can draw the same streams again, and their name is as
    fresh. With one, streams of another purpose have another name: rows of one name and number are
    taken for one release wherever ledgers are put together.
    """

    def __init__(self, number: int | None) -> None:
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"seed must be an int or None, not {type(number).__name__}")
        self.number = number

    @property
    def known(self) -> bool:
        return self.number is not None

    def key(self, purpose: str) -> bytes:
        """The key of a secret stream."""
        return self._stream(purpose).state

    def name(self, purpose: str) -> str:
        """The public name of the streams, which ledger rows carry."""
        return self.key(purpose).hex()[:16] if self.known else secrets.token_hex(8)

    def rekeyed(self, state: RunState, purpose: str) -> RunState:
        """A state before the first release, with other streams from the same number."""
        return replace(
            state,
            sampling=self.key(f"sampling, {purpose}"),
            # The first process alone has noise.
            noise=None if state.noise is None else self.key(f"noise, {purpose}"),
            stream=self.name(f"name, {purpose}"),
            same_batch=None,
            tries=0,
        )

    def _stream(self, purpose: str) -> Stream:
        return Stream.fresh() if self.number is None else Stream.seeded(self.number, purpose)
