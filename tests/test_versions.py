"""The compiled engine depends on no version of torch, and from CPython 3.12 on on no Python."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.transport.native import load_engine

DYNAMIC, NEEDED = 6, 1  # a type of section, a tag in it


def needed(module: Path) -> list[str]:
    """The libraries that a module's dynamic section names: DT_NEEDED of a 64-bit ELF file."""
    data = module.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    sections: list[tuple[int, ...]] = []
    start, size, count = (
        *struct.unpack_from("<Q", data, 0x28),
        *struct.unpack_from("<HH", data, 0x3A),
    )
    for index in range(count):
        # name, type, flags, address, offset, size, link
        sections.append(struct.unpack_from("<IIQQQQI", data, start + index * size))
    (dynamic,) = (section for section in sections if section[1] == DYNAMIC)
    strings = sections[dynamic[6]][4]
    names = []
    for at in range(dynamic[4], dynamic[4] + dynamic[5], 16):
        tag, value = struct.unpack_from("<QQ", data, at)
        if tag == NEEDED:
            names.append(data[strings + value :].split(b"\0", 1)[0].decode())
    return names


def test_the_engine_is_linked_with_no_library_of_torch_or_python() -> None:
    names = needed(Path(load_engine().__file__))
    assert "libc.so.6" in names
    assert not [name for name in names if name.startswith(("libtorch", "libc10", "libpython"))]


def test_the_engine_loads_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gradwire import _engine\n"
        "assert 'libtorch' not in open('/proc/self/maps').read()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(sys.version_info < (3, 12), reason="nanobind has the stable ABI from 3.12 on")
def test_one_engine_serves_every_python_from_3_12_on() -> None:
    assert Path(load_engine().__file__).name == "_engine.abi3.so"
