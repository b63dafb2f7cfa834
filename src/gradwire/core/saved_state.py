"""Reading a saved state: every value is checked, and an error changes nothing.

A `State` is a mapping with the name that errors give it. Each method returns one checked value, and
raises ConfigError naming the key, the value and what is allowed where the check fails.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gradwire.core.checks import is_number, is_whole, plain
from gradwire.core.errors import ConfigError

LARGEST_WHOLE = 1 << 62


@contextlib.contextmanager
def unchanged_on_error(*parts: object) -> Iterator[None]:
    """Gives objects their attributes back if loading them fails.

    Args:
        *parts: The objects; loading has to replace what their attributes hold, not to change it.
    """
    before = [(part, dict(vars(part))) for part in parts]
    try:
        yield
    except BaseException:
        for part, attributes in before:
            vars(part).update(attributes)
        raise


class State:
    """A mapping out of a saved state.

    Methods that return a value raise ConfigError where it is missing or not allowed.

    Args:
        name: Where it lies, as in "state['phases']".
    """

    def __init__(self, value: object, name: str = "state") -> None:
        if not isinstance(value, Mapping):
            raise ConfigError.about(
                f"{name}={_short(value)}", "a dictionary is needed", setting=name, value=value
            )
        self.name = name
        self.values: Mapping[Any, Any] = value

    def keys(self, required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Checks that all required keys are there, and no others but the optional ones."""
        for key in required:
            if key not in self.values:
                raise ConfigError.about(
                    f"{self.name} has no {key!r}; it needs {', '.join(map(repr, required))}",
                    "the state is damaged, or belongs to something else",
                    setting=self.at(key),
                )
        for key in self.values:
            if key not in required and key not in optional:
                known = ", ".join(map(repr, (*required, *optional))) or "no key at all"
                raise ConfigError.about(
                    self.at(key),
                    f"no such key; allowed are {known}",
                    setting=self.at(key),
                    value=self.values[key],
                )

    def at(self, key: object) -> str:
        """Returns how errors name the value of a key."""
        return f"{self.name}[{key!r}]"

    def part(self, key: str) -> State:
        return State(self._get(key), self.at(key))

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Returns a finite number within [low, high]."""
        value = plain(self._get(key))
        if not is_number(value) or not low <= value <= high:
            raise self.wrong(key, f"a finite number{_range(low, high)}")
        return float(value)

    def magnitude(self, key: str) -> float:
        """Returns a float from 0 on, infinity and NaN included, as of non-finite gradients."""
        value = plain(self._get(key))
        if (not is_number(value) and not isinstance(value, float)) or value < 0.0:
            raise self.wrong(key, "a number from 0 on")
        return float(value)

    def whole(self, key: str, low: int = 0, high: int = LARGEST_WHOLE) -> int:
        value = plain(self._get(key))
        if not is_whole(value) or not low <= value <= high:
            raise self.wrong(key, f"a whole number{_range(low, high)}")
        return value

    def flag(self, key: str) -> bool:
        value = plain(self._get(key))
        if not isinstance(value, bool):
            raise self.wrong(key, "True or False")
        return value

    def choice(self, key: str, allowed: Sequence[str]) -> str:
        value = self._get(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, " or ".join(map(repr, allowed)))
        return value

    def optional(self, key: str, read: Callable[[str], float]) -> float | None:
        """Returns what `read` makes of the value, or None where the value is None."""
        return None if self._get(key) is None else read(key)

    def numbers(self, key: str, low: float = -math.inf, *, infinite: bool = False) -> list[float]:
        """Returns a list of numbers from `low` on, all finite unless `infinite`."""
        values = self._get(key)
        if not isinstance(values, (list, tuple)):
            raise self.wrong(key, "a list of numbers")
        return [self._checked(self.at(key), value, low, infinite) for value in values]

    def by_bucket(self, low: float = 0.0) -> dict[int, float]:
        """Returns the whole mapping as finite numbers from `low` on, by bucket."""
        return {
            self._bucket(key): self._checked(self.at(key), value, low, False)
            for key, value in self.values.items()
        }

    def lists_by_bucket(self, low: float = 0.0) -> dict[int, list[float]]:
        """Returns the whole mapping as lists of numbers from `low` on (or infinite), by bucket."""
        return {self._bucket(key): self.numbers(key, low, infinite=True) for key in self.values}

    def by_name(self, low: float = 0.0) -> dict[str, float]:
        """Returns the whole mapping as numbers from `low` on (or infinite), by name."""
        for key in self.values:
            if not isinstance(key, str):
                raise ConfigError.about(
                    self.name,
                    f"key {_short(key)}: a name is needed",
                    setting=self.name,
                    value=key,
                )
        return {
            key: self._checked(self.at(key), value, low, True) for key, value in self.values.items()
        }

    def wrong(self, key: object, allowed: str) -> ConfigError:
        return _wrong(self.at(key), self.values[key], f"{allowed} is needed")

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError.about(
                f"{self.name} has no {key!r}",
                "the state is damaged, or belongs to something else",
                setting=self.at(key),
            )
        return self.values[key]

    def _bucket(self, key: object) -> int:
        bucket = plain(key)
        if not is_whole(bucket) or bucket < 0:
            raise ConfigError.about(
                f"{self.name}",
                f"key {_short(key)}: the number of a bucket is needed",
                setting=self.name,
                value=key,
            )
        return bucket

    def _checked(self, where: str, value: object, low: float, infinite: bool) -> float:
        number = plain(value)
        endless = infinite and isinstance(number, float) and number == math.inf
        if not (is_number(number) or endless) or not number >= low:  # type: ignore[operator]
            kind = "a number" if infinite else "a finite number"
            raise _wrong(where, value, f"{kind}{_range(low, math.inf)} is needed")
        return float(number)  # type: ignore[arg-type]


def _range(low: float, high: float) -> str:
    if high < LARGEST_WHOLE:
        return f" from {low:g} to {high:g}"
    return f" from {low:g} on" if low > -math.inf else ""


def _wrong(where: str, value: object, allowed: str) -> ConfigError:
    return ConfigError.about(f"{where}={_short(value)}", allowed, setting=where, value=value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({type(value).__name__})"
