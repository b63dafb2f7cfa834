"""The protocol's version is raised with every change of the packet formats."""

import hashlib
import re
from pathlib import Path

import pytest

from gradwire import _engine

WIRE = Path(__file__).resolve().parent.parent / "wire"

FORMATS = (2, "a0a5575d90141785")
"""The version, and the fingerprint of the formats that it stands for."""


def fingerprint() -> str:
    """Of the code of the formats: comments, blanks and the version itself left out."""
    text = "".join((WIRE / name).read_text(encoding="utf-8") for name in ("packet.h", "packet.cc"))
    text = re.sub(r"kVersion = \d+", "", re.sub(r"//[^\n]*", "", text))
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:16]


def test_another_format_has_another_version() -> None:
    """If this fails: does anything travel otherwise than before? Then raise kVersion, too."""
    assert (_engine.PROTOCOL_VERSION, fingerprint()) == FORMATS


def test_the_fingerprint_sees_a_field_and_no_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint()
    for name in ("packet.h", "packet.cc"):
        (tmp_path / name).write_text((WIRE / name).read_text() + "\n// more words\n")
    monkeypatch.setitem(globals(), "WIRE", tmp_path)
    assert fingerprint() == before
    text = (tmp_path / "packet.cc").read_text()
    (tmp_path / "packet.cc").write_text(text.replace("put(at, ack.share)", "put(at, ack.words)"))
    assert fingerprint() != before
