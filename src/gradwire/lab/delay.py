"""Delay and jitter for a host's way to the switch: the one place where they plug in.

A kernel with netem could do it by itself, but the two queues of a port are taken by the shaper, and
the lab wants the same link everywhere; so it is the lab's own user-space link on a TAP pair
(`gradwire.lab.delay_link`), which also makes runs of losses.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from gradwire.lab.network import LabUnavailable, Network
from gradwire.lab.scenario.schema import Scenario

__all__ = ["MODULE", "delayed", "needs_delay_links"]

MODULE = "gradwire.lab.delay_link"


def needs_delay_links(scenario: Scenario) -> bool:
    """Whether the kernel alone cannot make the scenario's links."""
    return bool(scenario.topology.rtt_s or scenario.loss.run > 1)


@contextlib.contextmanager
def delayed(network: Network, scenario: Scenario) -> Iterator[str | None]:
    """Put a delay link between every host that takes part and the switch, where one is needed.

    Each packet passes two links on its way, so each adds a quarter of the round-trip time.

    Yields:
        What makes the delay, for the results; None without.

    Raises:
        LabUnavailable: this gradwire has no delay link.
    """
    if not needs_delay_links(scenario):
        yield None
        return
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise LabUnavailable(
            f"topology.rtt_s={scenario.topology.rtt_s:g}, loss.run={scenario.loss.run:g}: this "
            f"gradwire has no delay link ({error}); rtt_s=0 and run=1 need none"
        ) from None
    topology, loss = scenario.topology, scenario.loss
    with contextlib.ExitStack() as stack:
        for host in range(topology.hosts):
            worker = host < topology.workers
            lost = loss.of_worker(host) if worker and loss.run > 1 else 0.0
            stack.enter_context(
                module.DelayLink(
                    network,
                    host,
                    delay_s=topology.rtt_s / 4,
                    jitter_s=topology.jitter_s / 2,
                    loss=lost,
                    loss_burst=loss.run,
                )
            )
        yield "user-space link on a TAP pair"
