"""Errors and warnings of the library, so that a caller can handle them apart from ordinary ones."""

from __future__ import annotations


class NoGuarantee(RuntimeError):
    """An ε was requested from a run whose settings give no differential privacy."""


class AccountingError(RuntimeError):
    """An accountant cannot give a reliable number; the message names another one that can."""


class BudgetExceeded(RuntimeError):
    """The request would spend more than a budget has left; nothing was released."""


class LedgerError(ValueError):
    """A ledger or journal is inconsistent, truncated, or was edited."""


class CommandError(Exception):
    """An error that the user of a command can correct: printed without a traceback, exit code 2."""


class InputError(CommandError, ValueError):
    """Data, a schema or a model name does not fit; the message explains what to do."""


class ConfigError(ValueError):
    """A setting that can't be used; the message says which one and what to do."""


class LossError(ValueError):
    """The loss reduces over records in another way than declared, or mixes records.

    The message explains how to correct it.
    """


class PrivacyLeakWarning(UserWarning):
    """Private data was used outside the mechanism, so ε does not cover that use."""


class OwnerWarning(UserWarning):
    """A warning for the owner of the data: its text is private and must not be published."""


class RankError(RuntimeError):
    """The processes of a distributed run cannot continue together; the message names the rank.

    Args:
        message: What went wrong.
        told: Whether another rank found the error first and reports it.
    """

    def __init__(self, message: str, told: bool = False) -> None:
        super().__init__(message)
        self.told = told
