"""For tests/ and engine/tests/: every property test can be repeated from what it printed, and no
collection of garbage looks through what the imports have left."""

import gc
import random

import hypothesis
import pytest

hypothesis.settings.register_profile("gradwire", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gradwire")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed")
    return f"hypothesis seed: {seed} (repeat with --hypothesis-seed={seed})"


def pytest_collection_finish() -> None:
    """gradwire collects garbage where a forgotten module may hold an engine. With torch imported
    that takes tenths of a second each time, unless what is there already is left out."""
    gc.collect()
    gc.freeze()
