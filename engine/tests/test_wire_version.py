"""The protocol's version is raised with every change of what travels: packets, chunks, plans."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from gradwire import _engine

WIRE = Path(__file__).resolve().parent.parent / "wire"

FORMATS = (12, "dee4123e4cd54c72")
"""The version, and the fingerprint of the formats that it stands for."""


def fingerprint() -> str:
    """Of the code of the formats: comments, blanks and the version itself left out."""
    text = "".join((WIRE / name).read_text(encoding="utf-8") for name in ("packet.h", "packet.cc"))
    text = re.sub(r"kVersion = \d+", "", re.sub(r"//[^\n]*", "", text))
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:16]


ENCODINGS = (
    ("f32", 1.0),
    ("f16", 1.0),
    ("bf16", 1.0),
    ("int8", 1.0),
    ("topk", 0.1),
    ("half", 1.0),
)
CONTENTS = (12, "e7a4774a2ba91531")
"""The version, and the fingerprint of encoded chunks and of plans."""


def contents() -> str:
    """Of what peers must read alike: every encoding of some values, and the bytes of some plans."""
    ramp = np.linspace(-3.0, 5.0, 61, dtype=np.float32)
    values = np.concatenate([ramp, np.float32([0.0, 1e-30, 1e30, np.inf, -np.inf, np.nan])])
    digest = hashlib.sha256()
    for encoding, kept in ENCODINGS:
        digest.update(_engine.encode_chunk(values, encoding, kept))
        digest.update(_engine.encode_chunk(ramp, encoding, kept))
        plan = _engine.Plan(
            elements=100,
            regions=[(0, 40, 0.0), (40, 60, 0.25)],
            spend="lost",
            encoding=encoding,
            kept=kept,
            pull="committed",
            pull_bound=0.01,
            seed=7,
        )
        digest.update(plan.hash.to_bytes(8, "little"))
    timed = [("first_arrival", "all", 1000, -1.0), ("tail", "all", 2000, 0.5)]
    plan = _engine.Plan(elements=9, regions=[(0, 9, 0.5)], spend="anything", schedule=timed)
    digest.update(plan.hash.to_bytes(8, "little"))
    return digest.hexdigest()[:16]


def test_another_encoding_or_plan_has_another_version() -> None:
    """If this fails, what peers of the same version send each other would be read otherwise."""
    assert (_engine.PROTOCOL_VERSION, contents()) == CONTENTS


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
