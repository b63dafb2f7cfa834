"""Communicator: starts transfers of float32 arrays over this process's engine.

One engine (one UDP socket, one engine thread) serves all communicators of the same group of
processes. It is opened by the first of them and closed with the last. A group with other members
gets an engine of its own. Completions run on a pool of threads apart from the engine's
(`gradwire.transport.threads`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwire.core.checks import is_whole
from gradwire.core.errors import ConfigError, GradwireError, TransferError
from gradwire.core.plan import TransferPlan
from gradwire.core.settings import LONGEST_S, Settings
from gradwire.transport import addresses
from gradwire.transport.arrays import as_flat, as_tensor
from gradwire.transport.joining import join_engine
from gradwire.transport.meeting import Meeting
from gradwire.transport.native import ChunkGrid, load_engine, native_plan, trivial_report
from gradwire.transport.plan_cache import CutPlan, PlanCache
from gradwire.transport.store import Store, compare_texts
from gradwire.transport.texts import read_all, read_wholes
from gradwire.transport.threads import StartQueue
from gradwire.transport.transfer import (
    Engine,
    Handle,
    OfThisProcess,
    TransferRequest,
    check_elements,
    check_encoding,
    check_priorities,
    shards_of,
)

if TYPE_CHECKING:
    import torch

DEFAULT_TIMEOUT_S = 1800.0
"""Longest duration of one transfer where neither a setting nor a process group names one."""

NUMBERS = 4095
"""How many numbers there are: an engine has 4,096 lanes, the first one for users without one."""


class Communicator(OfThisProcess):
    """All-reduces float32 arrays among `world_size` processes over UDP.

    Every rank calls `all_reduce` in the same order with the same plans. This order is one for all
    communicators of an engine that have taken no number. Each communicator that has
    (`take_number`) has an order of its own, and its calls may come before or after the others' on
    any rank. One worker without a server needs no sockets.

    Args:
        store: A torch.distributed Store that all processes share.
        rank: This worker's rank, from 0 to world_size - 1.
        world_size: Number of workers.
        config: Settings, or a mapping of them.
        group: Name of this group of processes; communicators of one process with the same store
            and group share an engine.
        timeout_s: Longest duration of one transfer in seconds, where the settings name none.
        timeout_from: Origin of that time-out, for errors.
        meeting: A meeting of the workers that has begun; None for one of its own.
        ranks: The workers' ranks in the job, which errors name; None for 0, 1, 2, ….
        engine: An open engine of the workers; None to join the group's, or to open it.
        leader: The rank in the job that speaks for this one, which then starts no transfers; None
            for none.

    Raises:
        ConfigError: A setting is impossible, or its port is in use.
        RendezvousError: Ranks are absent, of another version or of another configuration; the error
            names them.

    Attributes:
        rank: This worker's rank in the group.
        world_size: Number of workers.
        ranks: The workers' ranks in the job.
        settings: The settings.
        timeout_s: Longest duration of one transfer in seconds.
        store: The store.
        engine: The engine; None for one worker without a server.
        start_queue: The queue of the transfers that start later than they are asked for, shared by
            all communicators of the engine. Once it is started, all of them start through it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        config: Settings | Mapping[str, object] | None = None,
        *,
        group: str = "world",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        timeout_from: str = "the default",
        meeting: Meeting | None = None,
        ranks: Sequence[int] | None = None,
        engine: Engine | None = None,
        leader: int | None = None,
    ) -> None:
        settings = config if isinstance(config, Settings) else Settings.build(config)
        beside = f"with world_size={world_size!r}"
        whole = is_whole(rank) and is_whole(world_size)
        if not whole or world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError.of("rank", rank, "a rank from 0 to world_size - 1", beside=beside)
        self.rank = rank
        self.world_size = world_size
        self.ranks = tuple(range(world_size) if ranks is None else ranks)
        if len(self.ranks) != world_size:
            raise ConfigError.of("ranks", ranks, "one of each worker", beside=beside)
        self.settings = settings
        self.timeout_s = min(settings.timeout or timeout_s, LONGEST_S)
        given = settings.timeout is not None
        self._timeout_from = settings.origin("timeout") if given else timeout_from
        self.store = store
        self._group = group
        self._leader = leader
        self._plans = PlanCache()
        self._lane = 0  # the lane of all that have no number
        self._closed = False
        self.engine = engine
        if engine is None and (world_size > 1 or settings.server_count > 0):
            with contextlib.closing(self.meeting("open")) as own:
                self.engine = join_engine(meeting or own, store, group, settings)
        elif settings.interface is not None:
            addresses.local_addresses(settings.interface, None)  # checks it for one worker, too
        self.start_queue = (
            StartQueue("gradwire-stage") if self.engine is None else self.engine.start_queue
        )
        self._forget = self._forgetting()

    @property
    def job_rank(self) -> int:
        """The rank of this worker in the job, which reports and errors name."""
        return self.ranks[self.rank]

    @property
    def timeout_text(self) -> str:
        """The time-out and its origin, as errors name them."""
        return f"timeout={self.timeout_s:g} s, {self._timeout_from}"

    @property
    def aggregators(self) -> int:
        """The number of aggregators that share a bucket: the ranks, or the servers."""
        return self.settings.server_count or self.world_size

    @property
    def datagram(self) -> int:
        """The agreed size of datagrams in bytes."""
        return addresses.ETHERNET_DATAGRAM if self.engine is None else self.engine.datagram

    def take_number(self, meeting: Meeting, user: str = "a communicator") -> int:
        """Takes the smallest number from 0 on that no user of this engine has taken on any rank.

        From then on the transfers of this communicator are in order among themselves alone. The
        call is collective.

        Args:
            meeting: A meeting of the workers.
            user: What the communicator serves, for warnings.

        Returns:
            The number, the same on all ranks.

        Raises:
            GradwireError: No number is left; on all ranks alike.
        """
        if self.engine is None:
            return 0
        texts = meeting.exchange(json.dumps(sorted(self.engine.numbers)))
        taken = set(itertools.chain(*read_all(meeting, "the numbers", texts, read_wholes)))
        number = next(n for n in itertools.count() if n not in taken)
        if number >= NUMBERS:
            raise GradwireError(
                f"{NUMBERS} modules are attached over one engine, and no more can be: detach some, "
                "or attach one module that holds several"
            )
        self.engine.numbers[number] = f"{user}, number {number}"
        self._lane = 1 + number
        return number

    def return_number(self) -> None:
        """Gives back the number that `take_number` returned; to be called once."""
        if self.engine is not None:
            self.engine.numbers.pop(self._lane - 1, None)

    def meeting(self, topic: str) -> Meeting:
        """Makes a meeting of the workers in the store, on a topic."""
        return Meeting(
            self.store,
            f"{self._group}/{topic}",
            endpoint=self.rank,
            workers=self.world_size,
            servers=0,
            timeout_s=self.settings.rendezvous_timeout,
            ranks=self.ranks,
        )

    def compare(self, topic: str, text: str, wait_s: float) -> dict[int, str]:
        """Returns the texts of the ranks on a topic that is new for this engine (`compare_texts`).

        It needs no engine, so that ranks can find out why one has failed.
        """
        session = 0 if self.engine is None else self.engine.session
        prefix = f"gradwire/{self._group}/{session}/{topic}"
        return compare_texts(self.store, prefix, self.job_rank, self.ranks, text, wait_s)

    def all_reduce(
        self,
        array: NDArray[Any] | torch.Tensor,
        plan: TransferPlan | None = None,
        *,
        step: int = 0,
        critical: NDArray[np.uint32] | None = None,
        priorities: NDArray[np.uint8] | None = None,
        stats: Sequence[float] = (),
        timeout_s: float | None = None,
    ) -> Handle:
        """Starts a transfer: the sum of an array over all workers, in place.

        The caller leaves the array untouched until the handle is done. float16 and bfloat16 travel
        as they are; their sums are float32, and the results are rounded once.

        Args:
            array: float32, float16 or bfloat16, contiguous; a numpy array or a torch tensor on the
                CPU.
            plan: The plan; None for an exact sum. For float16 its encoding is "half", for bfloat16
                "bf16".
            step: The training step, for reports and errors.
            critical: uint32, the ids of chunks that must count.
            priorities: This worker's class of each chunk of the plan's grid, for plans with order
                "priority": uint8 from 0, which goes first, to 7; None for one class.
            stats: Up to eight finite numbers; the first four are summed over the workers, the
                others maximised.
            timeout_s: Longest duration of this transfer in seconds; None for the communicator's.

        Returns:
            The handle of the transfer.

        Raises:
            TypeError: The array is of another kind.
            ValueError: The array's memory cannot be worked on in place.
            ConfigError: The plan does not fit the array, or the priorities do not fit the plan.
            TransferError: The engine has failed or is closed.
            GradwireError: Another rank of the host speaks for this one.
        """
        if self._leader is not None:
            raise GradwireError(
                f"rank {self.job_rank} starts no transfers: rank {self._leader} leads its host "
                "and speaks for it; attach with hosts=False where each rank needs an engine"
            )
        flat, encoding = as_flat(array)
        if self._closed:
            raise TransferError("the communicator is closed", step=step, cause="closed")
        if plan is not None:
            check_elements(plan, flat.size)
        if flat.size == 0:
            handle = Handle(None, flat)
            handle.finish(trivial_report(TransferPlan.whole(1), 0, step, stats))
            return handle
        plan = plan or TransferPlan.whole(flat.size, encoding=encoding)
        check_encoding(plan, encoding)
        if self.engine is None:
            if plan.scale != 1.0:
                values = as_tensor(flat, encoding)
                values.copy_(values.float() * float(np.float32(plan.scale)))
            handle = Handle(plan, flat)
            handle.finish(trivial_report(plan, flat.size, step, stats))
            return handle
        grid, effective = self._cut(plan)
        if priorities is not None:
            check_priorities(plan, len(grid), priorities)
        return self.engine.start(
            TransferRequest(
                plan=plan,
                effective_bounds=effective,
                data=flat,
                lane=self._lane,
                step=step,
                critical=critical,
                priorities=priorities,
                stats=tuple(stats),
                timeout_s=self.timeout_s if timeout_s is None else min(timeout_s, LONGEST_S),
                timeout_from=self._timeout_from if timeout_s is None else "of the collective",
            )
        )

    def reduce_scatter(
        self,
        array: NDArray[np.float32] | torch.Tensor,
        plan: TransferPlan | None = None,
        *,
        shards: Sequence[int] | None = None,
        step: int = 0,
        critical: NDArray[np.uint32] | None = None,
        priorities: NDArray[np.uint8] | None = None,
        stats: Sequence[float] = (),
        timeout_s: float | None = None,
    ) -> Handle:
        """Starts a push without a pull: this worker's shard of the sum of a float32 array.

        The sum lands where the shard is in the array, and the rest of the array stays as it is.

        Args:
            array: As for `all_reduce`, and so are all that follow but for these two:
            plan: The plan; None for an exact sum. Its pull is of no importance.
            shards: Number of elements of each worker's shard, in order; None for those of the
                plan, or else for equal ones.
            step: See `all_reduce`.
            critical: See `all_reduce`.
            priorities: See `all_reduce`.
            stats: See `all_reduce`.
            timeout_s: See `all_reduce`.

        Returns:
            The handle of the transfer.

        Raises:
            ConfigError: The shards do not fit the array or the workers, or servers would keep
                them.
            Exception: As `all_reduce` does.
        """
        if self.settings.server_count:
            raise ConfigError.of(
                "route",
                self.settings.route,
                "a reduce-scatter leaves each sum with the worker whose it is; use route='sharded'",
            )
        elements = int(np.prod(array.shape))
        plan = plan or TransferPlan.whole(max(elements, 1))
        shards = shards_of(plan, elements, self.world_size, shards)
        if elements and (plan.pull != "none" or plan.shards != tuple(shards)):
            plan = replace(plan, pull="none", pull_bound=0.0, shards=tuple(shards))
        return self.all_reduce(
            array,
            plan if elements else None,
            step=step,
            critical=critical,
            priorities=priorities,
            stats=stats,
            timeout_s=timeout_s,
        )

    def chunk_grid(self, plan: TransferPlan) -> ChunkGrid:
        """Returns the chunk grid of a plan for the agreed datagrams and aggregators."""
        if self.engine is None:
            one = np.zeros(1, np.uint32)
            return ChunkGrid(np.zeros(1, np.uint64), np.array([plan.elements], np.uint32), one, one)
        return self._cut(plan).grid

    def effective_bounds(self, plan: TransferPlan) -> tuple[float, ...]:
        """Returns each region's bound after rounding down to whole chunks."""
        if self.engine is None:
            return (0.0,) * len(plan.regions)
        return self._cut(plan).bounds

    def elements_per_chunk(self, encoding: str, kept: float = 1.0, datagram: int = 0) -> int:
        """Returns how many elements a datagram carries in an encoding.

        Args:
            encoding: The encoding.
            kept: Share of the elements that "topk" keeps.
            datagram: Size of the datagram in bytes; 0 for the agreed one.
        """
        if self.engine is None:
            encoding, kept, datagram = "f32", 1.0, 0
        return int(load_engine().chunk_elements(encoding, kept, datagram or self.datagram))

    def round_trip(self, plan: TransferPlan, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns what the other ranks get of these float32 values under the plan's encoding."""
        if self.engine is None:
            return values.copy()
        made: NDArray[np.float32] = load_engine().round_trip(
            native_plan(plan), values, self.datagram, self.aggregators
        )
        return made

    def keep_encoding_error(
        self, plan: TransferPlan, sent: NDArray[np.float32], counted: NDArray[np.uint8]
    ) -> None:
        """Replaces what was pushed, in place, by the part of it that did not count.

        For chunks that counted that is the error of the encoding, or nothing where a value is not
        finite. Chunks that did not count stay as they are.

        Args:
            plan: The plan of the transfer.
            sent: float32, what was pushed.
            counted: uint8 for each chunk, from the transfer's report.
        """
        if self.engine is None:
            sent.fill(0.0)  # no wire, no encoding
            return
        load_engine().keep_encoding_error(
            native_plan(plan), sent, counted, self.datagram, self.aggregators
        )

    def counters(self) -> dict[str, float]:
        """Returns the engine's counters; empty without an engine."""
        return {} if self.engine is None else self.engine.counters()

    def set_drop(self, rate: float, burst: float = 1.0, seed: int = 0) -> None:
        """Injects loss of DATA packets in the receive path, for tests and demonstrations.

        Args:
            rate: Share of packets that are dropped, in [0, 1).
            burst: Mean length of a run of dropped packets; 1 for independent losses.
            seed: Seed of the losses.

        Raises:
            ValueError: A value is not allowed, or no run is so short at that rate.
        """
        if self.engine is not None:
            self.engine.set_drop(rate, burst, seed)

    def fail(self, why: str) -> None:
        """Stops the engine, so that every transfer fails on all ranks.

        Args:
            why: The reason, which the errors of all ranks give.
        """
        if self.engine is not None:
            self.engine.fail(why)

    def let_go(self) -> None:
        """Closes the communicator, but not an engine that is used with servers. Idempotent.

        Servers end with the engine, so it stays open for the next communicator.
        """
        if self.settings.server_count:
            self._closed = True
            self._forget()
        else:
            self.close()

    def alike(
        self, *, engine: Engine | None = None, meeting: Meeting | None = None
    ) -> Communicator:
        """Makes a communicator of the same workers and settings.

        Args:
            engine: Its engine; None opens one.
            meeting: The meeting in which the workers open one; None makes it.
        """
        return Communicator(
            self.store,
            self.rank,
            self.world_size,
            self.settings,
            group=self._group,
            timeout_s=self.timeout_s,
            timeout_from=self._timeout_from,
            meeting=meeting,
            ranks=self.ranks,
            engine=engine,
        )

    def take_over(self, fresh: Communicator) -> None:
        """Leaves the engine for that of another communicator, which is not used any more.

        All workers do so between the same two transfers.
        """
        assert self.engine is not None
        assert fresh.engine is not None
        if self._forget.detach() is not None:
            self.engine.leave()
        fresh._forget.detach()
        self.engine, self._lane = fresh.engine, fresh._lane
        self.start_queue = fresh.start_queue
        self._forget = self._forgetting()

    def close(self) -> None:
        """Closes the communicator, and the engine with its last communicator. Idempotent."""
        self._closed = True
        if self.engine is None:
            self.start_queue.stop()
        elif self._forget.detach() is not None:
            self.engine.leave()

    def _forgetting(self) -> weakref.finalize[[], Communicator]:
        forget = self.start_queue.stop if self.engine is None else self.engine.forget
        forgetting = weakref.finalize(self, forget)
        forgetting.atexit = False  # `gradwire.transport.registry` closes the engines at exit
        return forgetting

    def _cut(self, plan: TransferPlan) -> CutPlan:
        return self._plans.cut(plan, self.datagram, self.aggregators, self.settings.cores)
