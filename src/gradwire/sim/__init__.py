"""The engine in virtual time (`Fabric`), and whole jobs of many ranks on it (`Job`)."""

from gradwire.sim.fabric import (
    NETWORK_A,
    NETWORK_B,
    BrokenInvariantError,
    Fabric,
    Link,
    Sent,
)

__all__ = ["NETWORK_A", "NETWORK_B", "BrokenInvariantError", "Fabric", "Link", "Sent"]
