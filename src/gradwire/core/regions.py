"""The tensors of a bucket, and the regions of it that have a bound of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gradwire.core.checks import check_share
from gradwire.core.errors import ConfigError
from gradwire.core.hashed import HashedTuple


@dataclass(frozen=True)
class TensorSlot:
    """The place of a parameter, or of a part of one, in a bucket.

    Attributes:
        name: Name of the parameter in the model.
        offset: Its first element in the bucket.
        length: Its number of elements.
        part: The rank whose shard the part is; None for all of the parameter.
    """

    name: str
    offset: int
    length: int
    part: int | None = None

    @functools.cached_property
    def key(self) -> str:
        """The name under which values of its elements are kept from step to step."""
        return self.name if self.part is None else f"{self.name}[{self.part}]"

    @functools.cached_property
    def layer(self) -> str:
        """The name of the module that owns the parameter, "" for a name without a dot."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Region:
    """A range of a bucket with one bound.

    Attributes:
        offset: Its first element in the bucket.
        length: Its number of elements.
        bound: Share of its elements that a worker's contribution may lack, in [0, 1).
        name: Name in reports and errors; it does not count when regions are compared.
    """

    offset: int
    length: int
    bound: float
    name: str = field(default="", compare=False)


class Regions(HashedTuple[Region]):
    """The regions of one bucket, in order, from element 0 on without gaps.

    They are checked once for all plans that they are in, when `elements` is first read.
    """

    @functools.cached_property
    def elements(self) -> int:
        """The number of elements that the regions cover.

        Raises:
            ConfigError: A bound lies outside [0, 1), or there is a gap; the error names the region.
        """
        at = 0
        for region in self:
            check_share(f"bound of region {region.name or region.offset!r}", region.bound)
            if region.offset != at or region.length <= 0:
                raise ConfigError.about(
                    f"plan region {region.name!r} covers [{region.offset}, "
                    f"{region.offset + region.length})",
                    "regions must follow each other from 0 without gaps; expected one that "
                    f"starts at {at}",
                    setting="regions",
                    value=region,
                )
            at += region.length
        return at

    @staticmethod
    def of(regions: Iterable[Region]) -> Regions:
        """Makes Regions of these, or returns them unchanged where they already are."""
        return regions if isinstance(regions, Regions) else Regions(regions)

    @functools.cached_property
    def cuts(self) -> HashedTuple[int]:
        """The first element of each region, which a chunk grid needs beside `elements`."""
        return HashedTuple(region.offset for region in self)

    @functools.cached_property
    def exact(self) -> Regions:
        """The same regions with bound 0."""
        return Regions(replace(region, bound=0.0) for region in self)
