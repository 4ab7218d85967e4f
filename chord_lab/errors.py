"""One kind of error for everything a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message is one line saying what is wrong, which value, and what is legal. The CLI exits with 2."""
