"""Texts that endpoints read in the job's store are checked before anything is made of them.

Something else may have written into the store. A text that cannot be read is an error on all
endpoints alike, since all of them read the same texts.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from gradwire.core.checks import is_whole

if TYPE_CHECKING:
    from gradwire.transport.meeting import Meeting

Value = TypeVar("Value")

ELSE = "does something else write into the job's store?"

MOST_TEXT = 1 << 20
"""Bytes of the longest text of an endpoint; the longest of all are tables of a thousand bounds."""

WRONG = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What reading raises where a text is of another form."""


@dataclass
class Outcome:
    """The end of an exchange.

    Attributes:
        why: The failure; "" where there is none.
        at_fault: The endpoints at fault.
        texts: The texts of all endpoints, in order; none where it failed.
    """

    why: str = ""
    at_fault: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def dump(self) -> str:
        """Returns the outcome as the store holds it: every rank reads the texts of all."""
        text = json.dumps([self.why, self.at_fault, self.texts])
        return base64.b64encode(zlib.compress(text.encode(), 1)).decode()

    @staticmethod
    def load(text: str, endpoints: int) -> Outcome:
        """Reads an outcome; one that cannot be read is a failure that says so.

        Args:
            endpoints: Number of endpoints of the meeting, each of which may have a text.
        """
        try:
            return Outcome._read(text, endpoints)
        except (*WRONG, zlib.error) as error:
            return Outcome(f"the end of an exchange cannot be read ({_said(error)}): {ELSE}")

    @staticmethod
    def _read(text: str, endpoints: int) -> Outcome:
        packed = base64.b64decode(text, validate=True)
        most = (1 + endpoints) * MOST_TEXT
        unpacking = zlib.decompressobj()
        plain = unpacking.decompress(packed, most)
        if not unpacking.eof:
            raise ValueError(f"it is cut off, or longer than {most} bytes")
        why, at_fault, texts = read_list(json.loads(plain))
        return Outcome(
            read_text(why),
            read_wholes(at_fault),
            [read_text(each) for each in read_list(texts)],
        )


def read_opening(text: str) -> tuple[str, int, int] | None:
    """Returns id, workers and servers of a meeting; None for a text that is none."""
    found = re.fullmatch(r"([0-9a-f]{1,32}) ([0-9]{1,6}) ([0-9]{1,6})", text)
    return (found[1], int(found[2]), int(found[3])) if found else None


def read_all(
    meeting: Meeting, what: str, texts: Sequence[str], read: Callable[[Any], Value]
) -> list[Value]:
    """Returns what the endpoints have published as JSON.

    Args:
        what: What the texts are, for errors.
        read: Reads one of them; raises one of `WRONG` for what it cannot be.

    Raises:
        RendezvousError: A text cannot be read; on all endpoints alike, naming whose it is.
    """
    found = []
    for endpoint, text in enumerate(texts):
        try:
            found.append(read(json.loads(text)))
        except WRONG as error:
            raise meeting.error(
                f"{what} of {meeting.describe([endpoint])} cannot be read ({_said(error)}): {ELSE}",
                [endpoint],
            ) from None
    return found


def _said(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return "".join(sign if sign.isprintable() else " " for sign in text[:120])


def read_whole(value: object) -> int:
    """Returns a whole number of 32 bits; raises ValueError for anything else."""
    if not is_whole(value) or not 0 <= value < 1 << 32:
        raise ValueError("a number is wrong")
    return value


def read_text(value: object) -> str:
    """Returns a text; raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError("a text is missing")
    return value


def read_list(value: object) -> list[Any]:
    """Returns a list; raises TypeError for anything else."""
    if not isinstance(value, list):
        raise TypeError("a list is missing")
    return value


def read_wholes(value: object) -> list[int]:
    """Returns a list of whole numbers of 32 bits; raises TypeError or ValueError for others."""
    return [read_whole(each) for each in read_list(value)]


def read_mapping(value: object) -> Mapping[str, Any]:
    """Returns a mapping; raises TypeError for anything else."""
    if not isinstance(value, Mapping):
        raise TypeError("a mapping is missing")
    return value


def read_truth(value: object) -> bool:
    """Returns a truth value; raises TypeError for anything else."""
    if not isinstance(value, bool):
        raise TypeError("a truth value is missing")
    return value
