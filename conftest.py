"""For tests/ and engine/tests/: every property test can be repeated from what it printed, no
collection of garbage looks through what the imports have left, and no temporary file stays."""

import gc
import multiprocessing.util
import os
import random
import shutil
import signal
import tempfile

import hypothesis
import pytest

hypothesis.settings.register_profile("gradwire", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gradwire")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which what is tested has to heed
    if not hasattr(config, "workerinput"):  # the workers of xdist have the folder of their parent
        hold_temporary_files()


def hold_temporary_files() -> None:
    """Gives all processes of the tests one folder for temporary files, which goes with this one.

    Some that they start leave theirs behind: torchrun its logs, and what is killed anything. The
    folders of `tmp_path` stay where they always are, those of failed tests to be looked at.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="gradwire-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing's own folder, which it would miss.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed")
    return f"hypothesis seed: {seed} (repeat with --hypothesis-seed={seed})"


def pytest_collection_finish() -> None:
    """gradwire collects garbage where a forgotten module may hold an engine. With torch imported
    that takes tenths of a second each time, unless what is there already is left out."""
    gc.collect()
    gc.freeze()
