"""For tests/ and engine/tests/: every property test can be repeated from what it printed."""

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
