"""The errors that say something about privacy, so that a caller can tell them from ordinary ones."""

from __future__ import annotations


class NoGuarantee(RuntimeError):
    """An ε was asked for, but the run was configured so that no differential privacy is claimed."""


class AccountingError(RuntimeError):
    """An accountant can't give a number that can be trusted; the message says which other one can."""


class BudgetExceeded(RuntimeError):
    """What was asked for would spend more than a budget has left; nothing was released."""


class LedgerError(ValueError):
    """A ledger or journal contradicts itself, is cut off, or was edited."""


class CommandError(Exception):
    """Something the user of a command can put right: printed without a traceback, exit code 2."""


class InputError(CommandError, ValueError):
    """Data, a schema or a model name that does not fit; the message says what to do."""


class LossError(ValueError):
    """The loss does not reduce over records as was declared, or mixes them; the message names the cure."""


class PrivacyLeakWarning(UserWarning):
    """Something looked at private data outside the mechanism, so that ε does not cover it."""


class OwnerWarning(UserWarning):
    """For whoever holds the data: it tells something that no published file may hold."""


class RankError(RuntimeError):
    """The processes of a distributed run can't go on together; the message names the rank.

    ``told`` is true where another rank has said so first, and reports it.
    """

    def __init__(self, message: str, told: bool = False) -> None:
        super().__init__(message)
        self.told = told
