"""Communicator: buckets in, handles out; owns this process's engine.

One engine (one UDP socket, one engine thread) serves all communicators of the same group of
processes: it is opened by the first and closed with the last. A group with other members gets an
engine of its own. Completions run on a pool of threads distinct from the engine's, see
`gradwire.transport.threads`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradwire.core.checks import is_whole
from gradwire.core.errors import ConfigError, GradwireError, TransferError
from gradwire.core.plan import PRIORITY_CLASSES, REMEMBERED, Regions, TransferPlan
from gradwire.core.settings import LONGEST_S, Settings
from gradwire.transport import addresses, rendezvous
from gradwire.transport.arrays import as_float32
from gradwire.transport.engines import (
    EngineHost,
    collect_forgotten,
    forget_host,
    join_host,
    release_host,
)
from gradwire.transport.native import ChunkGrid, load_engine, native_plan, trivial_report
from gradwire.transport.operation import Connected, Handle
from gradwire.transport.threads import Stager

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkGrid", "Communicator", "Handle"]

DEFAULT_TIMEOUT_S = 1800.0
"""How long one all-reduce may take where neither a setting nor a process group says."""


NUMBERS = 4095
"""How many numbers there are: an engine has 4,096 lanes, the first one for those without."""


class Communicator(Connected):
    """All-reduces float32 arrays among `world_size` processes over UDP.

    store: a torch.distributed Store that all processes share. config: Settings, or a mapping of
    them. group: which group of processes this is; communicators of one process that share store
    and group share an engine. timeout_s: of one transfer where the settings name none;
    timeout_from: whose that is, for errors. meeting: of the workers, in which they met already;
    None for one of their own. ranks: the workers' ranks in the job, which errors name, where these
    are some of them; None for 0, 1, 2, ….

    Every rank calls `all_reduce` in the same order with the same plans. That order is one for all
    communicators of an engine that have taken no number; each that has (`take_number`) has an
    order of its own, so that its calls may come before or after the others', on each rank
    otherwise. Needs no sockets when there is one worker and no server.

    Raises ConfigError for impossible settings (a port in use among them) and RendezvousError
    naming the ranks that are absent, of another version or configured otherwise.
    """

    def __init__(
        self,
        store: rendezvous.Store,
        rank: int,
        world_size: int,
        config: Settings | Mapping[str, object] | None = None,
        *,
        group: str = "world",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        timeout_from: str = "the default",
        meeting: rendezvous.Meeting | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        settings = config if isinstance(config, Settings) else Settings.build(config)
        whole = is_whole(rank) and is_whole(world_size)
        if not whole or world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError.of(
                "rank",
                rank,
                "a rank from 0 to world_size - 1",
                beside=f"with world_size={world_size!r}",
            )
        self.rank = rank
        self.world_size = world_size
        self.ranks = tuple(range(world_size) if ranks is None else ranks)
        if len(self.ranks) != world_size:
            raise ConfigError.of(
                "ranks", ranks, "one of each worker", beside=f"with world_size={world_size!r}"
            )
        self.settings = settings
        self.timeout_s = min(settings.timeout or timeout_s, LONGEST_S)
        given = settings.timeout is not None
        self._timeout_from = settings.origin("timeout") if given else timeout_from
        self.store = store
        self._group = group
        self._plans: dict[object, tuple[ChunkGrid, tuple[float, ...]]] = {}
        self._grids: dict[object, ChunkGrid] = {}  # of whatever bounds
        self._lane = 0  # of all who have no number
        self._closed = False
        self._host: EngineHost | None = None
        if world_size > 1 or settings.server_count > 0:
            with contextlib.closing(self.meeting("open")) as own:
                self._host = join_host(meeting or own, store, group, settings)
        elif settings.interface is not None:
            addresses.local_addresses(settings.interface, None)  # wrong with one worker, too
        self._stager = Stager("gradwire-stage") if self._host is None else self._host.stager
        self._forget = weakref.finalize(self, forget_host, self._host, self._stager)
        self._forget.atexit = False  # the engines are closed by this module's own atexit

    @property
    def job_rank(self) -> int:
        """This worker's rank in the job, which reports and errors name."""
        return self.ranks[self.rank]

    @property
    def aggregators(self) -> int:
        """How many aggregators share a bucket: the ranks, or the servers."""
        return self.settings.server_count or self.world_size

    @property
    def stager(self) -> Stager:
        """The queue of the all-reduces that start later than they are asked for; one for all
        communicators of the engine. Whoever uses the engine starts through it once it is started.
        """
        return self._stager

    @property
    def datagram(self) -> int:
        """The agreed datagram size in bytes."""
        return addresses.ETHERNET_DATAGRAM if self._host is None else self._host.datagram

    def take_number(self, meeting: rendezvous.Meeting) -> int:
        """The smallest number from 0 on that no user of this engine has taken on any rank.

        From now on the all-reduces of this communicator are in order among themselves alone.
        Collective, in a meeting of the workers. Raises GradwireError, on all ranks alike, when
        there is none left.
        """
        if self._host is None:
            return 0
        texts = meeting.exchange(json.dumps(self._host.numbers()))
        taken = set(itertools.chain(*map(json.loads, texts)))
        number = next(n for n in itertools.count() if n not in taken)
        if number >= NUMBERS:
            raise GradwireError(
                f"{NUMBERS} modules are attached over one engine, and no more can be: detach some, "
                "or attach one module that holds several"
            )
        self._host.take_number(number)
        self._lane = 1 + number
        return number

    def return_number(self, number: int) -> None:
        """Gives back what `take_number` returned; once."""
        if self._host is not None:
            self._host.return_number(number)

    def meeting(self, topic: str) -> rendezvous.Meeting:
        """A meeting of the workers in the store."""
        return rendezvous.Meeting(
            self.store,
            f"{self._group}/{topic}",
            endpoint=self.rank,
            workers=self.world_size,
            servers=0,
            timeout_s=self.settings.rendezvous_timeout,
            ranks=self.ranks,
        )

    def all_reduce(
        self,
        array: NDArray[np.float32] | torch.Tensor,
        plan: TransferPlan | None = None,
        *,
        step: int = 0,
        critical: NDArray[np.uint32] | None = None,
        priorities: NDArray[np.uint8] | None = None,
        stats: Sequence[float] = (),
    ) -> Handle:
        """Starts the all-reduce of a float32 array (numpy, or a torch CPU tensor) in place.

        The array stays untouched by the caller until the handle is done. plan: an exact sum when
        None. step: for reports and errors. critical: ids of chunks that must count. priorities:
        this worker's class of each chunk of the plan's grid, uint8 from 0, which goes first, to 7;
        for plans with order "priority" (None: all alike). stats: up to eight finite numbers; the
        first four are summed over the workers, the others maximised.

        Raises TypeError and ValueError for an array that cannot be reduced, ConfigError for
        priorities that do not fit the plan, TransferError when the engine has failed or is closed.
        """
        flat = as_float32(array)
        if self._closed:
            raise TransferError("the communicator is closed", step=step, cause="closed")
        if plan is not None and plan.elements != flat.size:
            raise ConfigError.about(
                f"plan.elements={plan.elements} for an array of {flat.size} elements",
                "must match",
                setting="plan.elements",
                value=plan.elements,
            )
        if flat.size == 0:
            handle = Handle(None, flat)
            handle.finish(trivial_report(TransferPlan.whole(1), 0, step, stats))
            return handle
        plan = plan or TransferPlan.whole(flat.size)
        handle = Handle(plan, flat)
        if self._host is None:
            if plan.scale != 1.0:
                np.multiply(flat, np.float32(plan.scale), out=flat)
            handle.finish(trivial_report(plan, flat.size, step, stats))
            return handle
        grid, effective = self._described(plan)
        if priorities is not None:
            _check_priorities(plan, len(grid), priorities)
        self._host.start(
            handle,
            lane=self._lane,
            engine_plan=native_plan(plan),
            effective_bounds=effective,
            data=flat,
            step=step,
            critical=critical,
            priorities=priorities,
            stats=tuple(stats),
            timeout_s=self.timeout_s,
            timeout_from=self._timeout_from,
        )
        return handle

    def chunk_grid(self, plan: TransferPlan) -> ChunkGrid:
        """The chunk grid of a plan on this communicator's datagram size and aggregators."""
        if self._host is None:
            one = np.zeros(1, np.uint32)
            return ChunkGrid(np.zeros(1, np.uint64), np.array([plan.elements], np.uint32), one, one)
        return self._described(plan)[0]

    def effective_bounds(self, plan: TransferPlan) -> tuple[float, ...]:
        """Each region's bound after rounding down to whole chunks."""
        if self._host is None:
            return (0.0,) * len(plan.regions)
        return self._described(plan)[1]

    def elements_per_chunk(self, encoding: str, kept: float = 1.0, datagram: int = 0) -> int:
        """How many elements a datagram carries in an encoding.

        datagram: its size in bytes; 0 for the agreed one.
        """
        if self._host is None:
            encoding, kept, datagram = "f32", 1.0, 0
        return int(load_engine().chunk_elements(encoding, kept, datagram or self.datagram))

    def round_trip(self, plan: TransferPlan, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the other ranks get of these values under the plan's encoding; a new array."""
        if self._host is None:
            return values.copy()
        native = native_plan(plan)
        made: NDArray[np.float32] = load_engine().round_trip(
            native, values, self.datagram, self.aggregators
        )
        return made

    def keep_encoding_error(
        self, plan: TransferPlan, sent: NDArray[np.float32], counted: NDArray[np.uint8]
    ) -> None:
        """Leaves in `sent` (what was pushed) what did not count of it, in place.

        Of chunks that counted, what the encoding took; nothing of those with a value that is not
        finite. Chunks that did not count stay as they are. counted: of the transfer's report.
        """
        if self._host is None:
            sent.fill(0.0)  # no wire, no encoding
            return
        load_engine().keep_encoding_error(
            native_plan(plan), sent, counted, self.datagram, self.aggregators
        )

    def counters(self) -> dict[str, float]:
        """The engine's counters; empty without an engine."""
        return {} if self._host is None else self._host.counters()

    def set_drop(self, rate: float, burst: float = 1.0, seed: int = 0) -> None:
        """Injects loss of DATA packets in the receive path (tests and demonstrations)."""
        if self._host is not None:
            self._host.set_drop(rate, burst, seed)

    def let_go(self) -> None:
        """Closes the communicator; beside servers, which end with the engine, that stays open for
        the next communicator. Idempotent."""
        if self.settings.server_count:
            self._closed = True
            self._forget()
        else:
            self.close()

    def close(self) -> None:
        """Closes the communicator, and the engine with its last communicator. Idempotent."""
        self._closed = True
        if self._forget.detach() is not None:
            collect_forgotten()
            release_host(self._host)
        if self._host is None:
            self._stager.stop()

    def _described(self, plan: TransferPlan) -> tuple[ChunkGrid, tuple[float, ...]]:
        regions = Regions.of(plan.regions)
        key = (plan.elements, regions, plan.encoding, plan.kept, plan.datagram)
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            native = native_plan(plan)
            cut = (plan.elements, regions.cuts, plan.encoding, plan.kept, plan.datagram)
            grid = self._grids.get(cut)
            if grid is None:
                if len(self._grids) >= REMEMBERED // 4:
                    self._grids.clear()
                grid = ChunkGrid(*load_engine().chunk_grid(native, self.datagram, self.aggregators))
                self._grids[cut] = grid
            bounds = tuple(native.effective_bounds(self.datagram, self.aggregators))
            known = self._plans[key] = (grid, bounds)
        return known


def _check_priorities(plan: TransferPlan, chunks: int, priorities: NDArray[np.uint8]) -> None:
    if plan.order != "priority":
        raise ConfigError.about(
            f"priorities for a plan with order={plan.order!r}",
            "only order='priority' has classes",
            setting="priorities",
            value=priorities,
        )
    if priorities.dtype != np.uint8 or priorities.shape != (chunks,):
        raise ConfigError.about(
            f"priorities of shape {priorities.shape} and type {priorities.dtype}",
            f"one uint8 for each of {chunks} chunks",
            setting="priorities",
            value=priorities,
        )
    if chunks and int(priorities.max()) >= PRIORITY_CLASSES:
        raise ConfigError.about(
            f"priorities: class {priorities.max()}",
            f"allowed are 0 to {PRIORITY_CLASSES - 1}",
            setting="priorities",
            value=int(priorities.max()),
        )
