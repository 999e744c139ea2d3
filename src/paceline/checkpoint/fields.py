"""Typed reading of a checkpoint's loose key-value metadata: a bad value is one clear error, never a stack trace."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.errors import CheckpointError, quote


class Fields:
    """A read-only view of `values`, which came out of the file `origin`; every method raises `CheckpointError`."""

    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self._values = values
        self.origin = origin

    def get(self, key: str) -> object:
        """The raw value, None where the key is absent or null."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null: to some keys that is a value."""
        return key in self._values

    def section(self, key: str) -> Fields | None:
        """The object under `key`, or None where it is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, dict):
            return Fields(value, f"{self.origin}: {key}")
        raise self.wrong(key, "an object")

    def integer(self, key: str, default: int | None = None) -> int:
        """An int; without a default the key must be there."""
        value = self.optional_integer(key)
        if value is not None:
            return value
        if default is None:
            raise self.missing(key)
        return default

    def optional_integer(self, key: str) -> int | None:
        """An int, or None where the key is absent or null."""
        value = self.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.wrong(key, "one integer")

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float; without a default the key must be there."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise self.wrong(key, "a finite number")

    def text(self, key: str, default: str | None = None) -> str:
        """A string; without a default the key must be there."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if isinstance(value, str):
            return value
        raise self.wrong(key, "a string")

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.wrong(key, "true or false")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; empty where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            return tuple(ids)
        raise self.wrong(key, "a token id or a list of token ids")

    def missing(self, key: str) -> CheckpointError:
        """The error for a key that is not there."""
        return CheckpointError(f"{self.origin}: {key} is missing")

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error for a value of the wrong kind."""
        return CheckpointError(f"{self.origin}: {key} is {quote(self.get(key))}, expected {expected}")
