"""The keys by which two endpoints know each other's datagrams, made anew at each meeting.

The schedule is that of TLS 1.3 (RFC 8446, section 7.1) with labels of gradwire's own. Its
pre-shared key is the session's, which endpoint 0 makes and the store gives to all (psk_ke), or the
user's; then ephemeral keys of X25519 add what no reader of the store knows (psk_dhe_ke). Each
endpoint also publishes random bytes, so that no life of a job has keys of another. libcrypto
computes all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.core.errors import EngineMissingError, GradwireError
from gradwire.core.plan import SMALLEST_DATAGRAM
from gradwire.core.settings import Settings
from gradwire.transport.native import load_engine

SECRET_BYTES = 32
SESSION_BYTES = 16
"""Bytes of randomness in a session's key."""

MODES = {"none": "none", "session": "headers", "whole": "whole", "key": "secret"}
"""The engine's word for each value of the setting `auth`."""

ZEROS = bytes(SECRET_BYTES)
AES, CHACHA = "aes-128-gcm", "chacha20-poly1305"

Secrets = list[tuple[bytes, bytes] | None]
"""By endpoint: the secrets of what goes there and of what comes from there, None for oneself."""


@dataclass(frozen=True)
class Hello:
    """What an endpoint publishes for the keys, in hexadecimal digits.

    Attributes:
        salt: Random bytes.
        public: Its ephemeral public key; "" without a key of the user's.
        session: The session's key, from endpoint 0; "" elsewhere, and with a key of the user's.
        aes: Whether its processor has instructions for AES.
    """

    salt: str = ""
    public: str = ""
    session: str = ""
    aes: bool = True


class KeyMaker:
    """Makes the keys of one endpoint for one meeting.

    Raises:
        EngineMissingError: There is no libcrypto, or it does not do what keys need.
    """

    def __init__(self, endpoint: int, settings: Settings) -> None:
        self.auth = settings.authentication
        self._endpoint = endpoint
        self._key = settings.secret_key()
        self._own = b""
        if self.auth == "none":
            self.hello = Hello()
            return
        native = _load_libcrypto()
        if self._key:
            self._own = os.urandom(SECRET_BYTES)
        leads = endpoint == 0 and not self._key
        with libcrypto_errors():
            native.hkdf_extract(ZEROS, ZEROS)  # that it can, while all may still hear of it
            self.hello = Hello(
                os.urandom(SECRET_BYTES).hex(),
                native.x25519_public(self._own).hex() if self._own else "",
                os.urandom(SESSION_BYTES).hex() if leads else "",
                bool(native.has_aes()),
            )

    @property
    def tag_bytes(self) -> int:
        return 0 if self.auth == "none" else int(load_engine().TAG_BYTES)

    def without_tag(self, datagram: int) -> int:
        """Returns how much of a datagram of this length is the engine's own.

        The shortest datagrams of all are longer by their tag than they were set to be.
        """
        return max(SMALLEST_DATAGRAM, datagram - self.tag_bytes)

    def proof(self, everybody: Sequence[Hello]) -> str:
        """Returns what two endpoints publish alike only if they have the same key of the user's."""
        if not self._key:
            return ""
        native, early = load_engine(), self._early(self._key)
        proof: bytes = native.hkdf_expand_label(early, "ext binder", self._transcript(everybody))
        return proof.hex()

    def engine_options(self, everybody: Sequence[Hello], cores: int = 1) -> dict[str, Any]:
        """Returns the arguments of the engine for its gates.

        Args:
            cores: Number of its threads; each talks to those of the same number elsewhere, and has
                keys of its own.
        """
        if self.auth == "none":
            return {}
        return {
            "auth": MODES[self.auth],
            "cipher": AES if all(each.aes for each in everybody) else CHACHA,
            "secrets": [each for core in range(cores) for each in self._secrets(everybody, core)],
        }

    def _early(self, key: bytes) -> bytes:
        early: bytes = load_engine().hkdf_extract(ZEROS, key)
        return early

    def _secrets(self, everybody: Sequence[Hello], core: int) -> Secrets:
        native = load_engine()
        hellos = list(everybody)
        hellos[self._endpoint] = self.hello  # what the store says of it may be of another life
        early = self._early(self._key or bytes.fromhex(hellos[0].session))
        derived = native.hkdf_expand_label(early, "derived", hashlib.sha256().digest())
        without = None if self._own else native.hkdf_extract(derived, ZEROS)
        found: Secrets = []
        for peer, hello in enumerate(hellos):
            if peer == self._endpoint:
                found.append(None)
                continue
            handshake = without
            if self._own:
                shared = native.x25519(self._own, bytes.fromhex(hello.public))
                handshake = native.hkdf_extract(derived, shared)
            low, high = sorted((peer, self._endpoint))
            context = self._transcript([hellos[low], hellos[high]], low, high, core)
            up, down = (native.hkdf_expand_label(handshake, way, context) for way in ("up", "down"))
            found.append((up, down) if self._endpoint == low else (down, up))
        return found

    def _transcript(self, hellos: Sequence[Hello], *more: int) -> bytes:
        """Hashes how all authenticate, what endpoints said, and to whom the keys belong."""
        said = [[self.auth, each.salt, each.public] for each in hellos]
        return hashlib.sha256(json.dumps([said, more]).encode()).digest()


@contextlib.contextmanager
def libcrypto_errors() -> Iterator[None]:
    """Raises EngineMissingError, which names the setting, for what the engine says of libcrypto.

    One that is configured for FIPS, for instance, has none of the functions that keys need.
    """
    try:
        yield
    except GradwireError:
        raise
    except RuntimeError as error:
        configured = "" if "not found" in str(error) else " (is it configured for FIPS?)"
        raise EngineMissingError(
            f'auth: {error}{configured}, or set auth="none" and no key on all ranks where no '
            "stranger reaches the network"
        ) from error


def _load_libcrypto() -> Any:
    """Loads libcrypto into the engine: that of Python's ssl where it is a file of its own."""
    native = load_engine()
    with libcrypto_errors():
        native.load_libcrypto(_candidates())
    return native


def _candidates() -> list[str]:
    try:
        import _ssl  # noqa: F401

        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except (ImportError, OSError):
        return []
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return sorted({path for path in paths if Path(path).name.startswith("libcrypto")})
