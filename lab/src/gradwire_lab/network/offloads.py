"""Switch the segmentation offloads of a network device off, and make sure of it."""

from __future__ import annotations

from contextlib import closing

from pyroute2.ethtool.ioctl import IoctlEthtool


def _is_offload(feature: str) -> bool:
    return (feature.startswith("tx-") and ("segmentation" in feature or "-gso" in feature)) or (
        feature.startswith("rx-") and "gro" in feature
    )


def active_offloads(device: str) -> set[str]:
    """Return the names of the GSO, TSO, USO and GRO features that a device has on."""
    with closing(IoctlEthtool(device)) as ethtool:
        features = ethtool.get_features()
        return {name for name, on, *_ in features if on and _is_offload(name)}


def switch_offloads_off(device: str, *, udp_only: bool = False) -> None:
    """Turn GSO, TSO, USO and GRO off on a device of the present network namespace.

    Raises:
        OSError: the kernel kept one of them on.
    """
    with closing(IoctlEthtool(device)) as ethtool:
        features = ethtool.get_features()
        unwanted = {name for name, *_ in features if _is_offload(name)}
        if udp_only:
            unwanted &= {"tx-udp-segmentation"}
        for name, on, available, *_ in list(features):
            if on and available and name in unwanted:
                features[name] = False
        ethtool.set_features(features)
    left = active_offloads(device) & unwanted
    if left:
        raise OSError(f"{device}: the kernel keeps {', '.join(sorted(left))} on")
