"""Types of the compiled engine (engine/binding). Times are in nanoseconds, sizes in bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradwire.core.errors import Cause

PROTOCOL_VERSION: int
DEFAULT_MEMORY_LIMIT: int
HEADER_BYTES: int
CAUSES: list[Cause]

class Plan:
    """One transfer as all ranks agreed on it; immutable.

    regions: (offset, length, bound) in elements, in order, covering [0, elements).
    schedule: (clock, scope, delay_ns, fraction); clock is "open", "first_arrival" or "tail",
        scope "worker" or "all"; fraction in [0, 1], or -1 for "one minus the region's bound".
    spend: "nothing", "late", "lost" or "anything". fill: "zero" or "mean".
    order: "shuffled", "sequential", or "priority": by the classes that each worker gives its own
        chunks, shuffled within a class. class_dscp (order "priority" only): DSCP of the datagrams
        of each class, up to 8 from 0 to 63, the last one for all further classes; empty for the
        engine's. pull: "exact", "committed" (pull_bound: what may be left out), "none" (push only:
        each result stays with its aggregator) or "lossy" (up to pull_bound of each region's results
        missing at each worker alone).
    control: "stream", or "probe": the push and a lossy pull go in passes; not with order
        "priority".
    scale multiplies each finished sum (1/world size for an average).
    encoding: of pushed chunks and of results: "f32", "f16" (with a power-of-two scale per chunk),
        "bf16", "int8" (with a scale per chunk) or "topk" (the share `kept` of each chunk's
        elements, the largest magnitudes). Under pull="none" results stay f32.
    datagram_bytes: of the datagrams that chunks are cut for; 0 for the agreed ones, which are the
        longest that are allowed.
    Raises ValueError naming the field, the value and what is allowed.
    """

    def __init__(
        self,
        *,
        elements: int,
        regions: Sequence[tuple[int, int, float]],
        spend: str = "nothing",
        schedule: Sequence[tuple[str, str, int, float]] = (("open", "all", 0, 1.0),),
        fill: str = "zero",
        order: str = "sequential",
        pull: str = "exact",
        pull_bound: float = 0.0,
        scale: float = 1.0,
        seed: int = 0,
        encoding: str = "f32",
        kept: float = 1.0,
        class_dscp: Sequence[int] = (),
        control: str = "stream",
        datagram_bytes: int = 0,
    ) -> None: ...
    @property
    def elements(self) -> int: ...
    @property
    def hash(self) -> int: ...
    def effective_bounds(self, datagram_bytes: int, aggregators: int) -> list[float]: ...

def chunk_grid(
    plan: Plan, datagram_bytes: int, aggregators: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """The chunk grid: element offsets, lengths, region index and aggregator of each chunk."""

def least_memory_limit(plan: Plan, datagram_bytes: int, workers: int, servers: int = 0) -> int:
    """The memory limit of an engine, in bytes, below which a job cannot take an op of this plan."""

def round_trip(
    plan: Plan, values: NDArray[np.float32], datagram_bytes: int, aggregators: int
) -> NDArray[np.float32]:
    """What the other ranks get of these values: each chunk of the grid encoded and decoded."""

def keep_encoding_error(
    plan: Plan,
    values: NDArray[np.float32],
    counted: NDArray[np.uint8],
    datagram_bytes: int,
    aggregators: int,
) -> None:
    """Leaves of a worker's values, in place, what did not count: chunks that did not count stay as
    they are, of the others only what the encoding took remains (0 for f32, and in chunks with a
    value that is not finite)."""

def mean_magnitudes(
    values: NDArray[np.float32], offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> NDArray[np.float32]:
    """The mean magnitude of each chunk's elements; infinite where their sum is not finite.
    ValueError for a chunk that reaches beyond the values."""

def square_sums(values: NDArray[np.float32], starts: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The sum of the squares of the elements from each start to the next, and from the last to the
    end; not finite only where an element is not. ValueError for starts out of order."""

def write_chunks(
    values: NDArray[np.float32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    source: NDArray[np.float32],
    begin: int,
    factor: float,
) -> None:
    """Writes the chunks' elements that `source` holds (those from `begin` on), times `factor`, in
    place. ValueError for a chunk that reaches beyond the values."""

def chunk_elements(encoding: str, kept: float, datagram_bytes: int) -> int:
    """The most elements that one datagram carries."""

def encode_chunk(values: NDArray[np.float32], encoding: str, kept: float = 1.0) -> bytes:
    """The payload of one chunk."""

def decode_chunk(
    payload: bytes, elements: int, encoding: str, kept: float = 1.0
) -> NDArray[np.float32]:
    """The values of one chunk; ValueError for a payload that is none."""

def decode_chunks(
    values: NDArray[np.float32],
    lengths: NDArray[np.int64],
    heads: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    encoding: str,
) -> None:
    """Writes the values of a vector's chunks, in the order of the elements. heads and codes: the
    bytes of the chunks' payloads (engine/codec/codec.h), what comes before the elements (f16: the
    shift, int8: the scale, bf16: nothing) and the elements, apart. encoding: f16, bf16 or int8.
    ValueError where sizes do not fit, or a head is none."""

HADAMARD_BLOCK: int
"""Elements of a block of `hadamard`."""

def hadamard(values: NDArray[np.float32], seed: int, inverse: bool = False) -> None:
    """The randomised Hadamard transform, in place: signs drawn from the seed, then the orthonormal
    transform of each block, the rest in blocks of ever smaller powers of two; or its inverse."""

class Failure:
    """Why an engine has failed."""

    text: str
    rank: int  # the endpoint at fault, -1 when none
    cause: Cause

class Peer:
    """What an engine knows of another one that it talks to."""

    endpoint: int
    answered: bool  # a ping of full length has been answered
    heard: bool  # something has come from it
    silence_ns: int  # since then, or since the engines met
    def has_begun(self, op: int, lane: int = 0) -> bool:
        """Whether it has started this op, as far as is known; False of servers."""

class Completion:
    """What became of one all-reduce (one op)."""

    op: int  # in its lane
    lane: int
    step: int
    ok: bool
    error: str  # "" when ok; names rank, step and cause
    error_rank: int  # the endpoint at fault, -1 when none
    error_cause: Cause
    counted: NDArray[np.uint8]  # per chunk: 1 where this worker's contribution counted
    applied: NDArray[np.uint8]  # per chunk: 1 where a result was applied, 0 where it is zero
    # committed pull, sharded route: chunks of this rank's shard whose result was not applied
    # (this rank keeps them as its residual) and their scaled results, concatenated
    withheld_chunks: NDArray[np.uint32]
    withheld_values: NDArray[np.float32]
    error_offset: int  # the element that take_result_error begins at
    delivered: list[float]  # per region: fraction of this worker's elements that counted
    exceeded: list[int]  # regions whose loss exceeded their bound (plans by time only)
    stats_sum: list[float]  # the four summed slots of every worker's stats, in rank order, f64
    stats_max: list[float]  # the four maximum slots
    push_ns: int  # start until this worker's last contribution was decided
    pull_ns: int  # first result until complete
    total_ns: int
    bytes_sent: int  # on the wire by this engine for this op (UDP payloads)
    packets_sent: int
    retransmissions: int
    passes: int  # of the push, the most that a shard took; 0 under control "stream"
    datagram_bytes: int  # the longest that all paths carry, alike at all workers: for later plans
    rtprop_ns: int  # smallest over peers' paths of the last 10 s
    btlbw: float  # bytes/s, the engine's bottleneck estimate

    def take_result_error(self) -> NDArray[np.float32]:
        """With an encoding, sharded route: what it took from the scaled results of this rank's
        shard, for all elements of the shard, from error_offset on (this rank keeps it as its
        residual). Hands the memory over: empty from the second call on."""

class Engine:
    """One UDP engine of this process: one socket, one thread that never takes the GIL.

    Endpoints 0..workers-1 are the workers (ranks), then the servers. servers=0 is the
    sharded route. Raises OSError (address in use, no such address), ValueError.
    """

    def __init__(
        self,
        *,
        endpoint: int,
        workers: int,
        servers: int,
        session: int,
        address: str,
        port: int = 0,
        datagram_bytes: int = 1472,
        peer_timeout_ns: int = 30_000_000_000,
        memory_limit: int = 0,
        drop_rate: float = 0.0,  # receive-path loss injection: of DATA packets
        drop_burst: float = 1.0,  # mean length of a loss run (Gilbert-Elliott)
        drop_seed: int = 0,
        dscp: int = 0,  # of all datagrams to which no plan gives another
        ecn: bool = True,  # ECT(0) on what is acknowledged, where kernel and path carry it
        ranks: Sequence[int] = (),  # what texts call the workers; none: 0, 1, 2, …
    ) -> None: ...
    @property
    def address(self) -> tuple[str, int]: ...
    def connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        """The addresses of all endpoints in order (own included). Starts the pings."""
    def wait_connected(self, timeout_ns: int) -> list[int]:
        """Waits until every endpoint answered; returns those that have not. Releases the GIL."""
    def all_reduce(
        self,
        *,
        op: int,
        lane: int = 0,
        step: int,
        plan: Plan,
        data: NDArray[np.float32],
        critical: NDArray[np.uint32] | None = None,  # chunk ids that must count
        priorities: NDArray[np.uint8] | None = None,  # class of each chunk, 0 (first) to 7
        stats: Sequence[float] = (),  # up to 8: first four are summed, last four maximised
        timeout_ns: int = 1_800_000_000_000,
        timeout_from: str = "",  # whose setting that is, for the text of an error
    ) -> None:
        """Starts one all-reduce in place; the caller keeps `data` alive and untouched until the
        Completion. The ops of a lane are numbered 0, 1, 2, … alike on all workers; those of
        different lanes may start in any order. Thread-safe, never blocks. Raises RuntimeError
        when the engine has failed or is closed."""
    def next_completion(self, timeout_ns: int) -> Completion | None:
        """Blocks without the GIL for the next Completion; None at the time-out or once closed."""
    def set_drop(self, rate: float, burst: float = 1.0, seed: int = 0) -> None:
        """Receive-path loss injection (the demo's fallback without namespaces)."""
    def counters(self) -> dict[str, float]:
        """packets/bytes sent and received, retransmissions, drops, rtprop_ns, btlbw, …"""
    def peers(self) -> list[Peer]:
        """What this engine knows of each that it talks to."""
    def refusal(self) -> str:
        """Why the kernel refused datagrams, and how many; "" where it took all of them."""
    def features(self) -> dict[str, bool | int]:
        """udp_segment, udp_gro, rcvbuf, sndbuf, timestamps, dscp, ecn: what the kernel granted;
        rcvbuf_asked, sndbuf_asked: bytes that were asked for."""
    def failure(self) -> Failure | None:
        """Why the engine can no longer serve (a dead peer, another plan, …); None while it can."""
    def leave_to_parent(self) -> None:
        """In a forked child: lets go of the socket, so that it ends with the parent's close."""
    def close(self) -> None:
        """Says goodbye to the peers, joins the thread, fails what is open. Idempotent."""

def version() -> str: ...

class Fabric:
    """Endpoints in virtual time on one switch; `gradwire.sim.fabric` wraps it with seconds.

    A direction is "up" (host to switch) or "down" (switch to host, the port that incast fills).
    Rates are bytes per second of wire bytes. Raises ValueError.
    """

    def __init__(
        self,
        *,
        workers: int,
        servers: int = 0,
        seed: int = 0,
        rate: float = 125e6,
        delay_ns: int = 20_000,
        queue_bytes: int = 262_144,
        loss: float = 0.0,
        loss_burst: float = 1.0,
        reorder: float = 0.0,
        reorder_delay_ns: int = 100_000,
        duplicate: float = 0.0,
        garbage: float = 0.0,
        flip: float = 0.0,
        ecn_bytes: int = 0,
        bleach: bool = False,
        drop_ect: bool = False,
        longest: int = 0,
        ecn: bool = True,
        overhead: int = 42,
        whole_trains: bool = False,
        host_delay_ns: int = 0,
        host_jitter_ns: int = 0,
        datagram_bytes: int = 1472,
        peer_timeout_ns: int = 30_000_000_000,
        ping_interval_ns: int = 1_000_000_000,
        delay_target_ns: int = 1_300_000,
        receive_buffer: int = 1_048_576,
        memory_limit: int = 2_147_483_648,
        pacing: bool = True,
        session: int = 1,
        trace_limit: int = 0,
    ) -> None: ...
    @property
    def now_ns(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def trace_hash(self) -> int: ...
    def set_link(
        self,
        host: int,
        direction: str,
        *,
        rate: float | None = None,
        delay_ns: int | None = None,
        queue_bytes: int | None = None,
        loss: float | None = None,
        loss_burst: float | None = None,
        reorder: float | None = None,
        reorder_delay_ns: int | None = None,
        duplicate: float | None = None,
        garbage: float | None = None,
        flip: float | None = None,
        ecn_bytes: int | None = None,
        bleach: bool | None = None,
        drop_ect: bool | None = None,
        longest: int | None = None,
    ) -> None: ...
    def link(self, host: int, direction: str) -> dict[str, int]: ...
    def cross_traffic(
        self,
        host: int,
        direction: str = "down",
        *,
        rate: float,
        start_ns: int = 0,
        length_ns: int,
        period_ns: int = 0,
        packet_bytes: int = 1514,
        train: int = 1,
    ) -> None: ...
    def pause(self, host: int) -> None: ...
    def resume(self, host: int) -> None: ...
    def kill(self, host: int) -> None: ...
    def partition(self, a: int, b: int, parted: bool = True) -> None: ...
    def inject(self, source: int, destination: int, data: bytes) -> None: ...
    def start(
        self,
        *,
        worker: int,
        op: int,
        lane: int = 0,
        step: int,
        plan: Plan,
        data: NDArray[np.float32],
        critical: NDArray[np.uint32] | None = None,
        priorities: NDArray[np.uint8] | None = None,
        stats: Sequence[float] = (),
        timeout_ns: int = 1_800_000_000_000,
        at_ns: int = 0,
    ) -> None: ...
    def close(self, host: int, linger_ns: int = 2_000_000_000) -> None: ...
    def forget(self) -> None: ...
    def run(self, until_ns: int, until_done: bool = True) -> bool: ...
    def completion(self, worker: int, op: int, lane: int = 0) -> Completion | None: ...
    def result(self, worker: int, op: int, lane: int = 0) -> NDArray[np.float32]: ...
    def finished_at_ns(self, worker: int, op: int, lane: int = 0) -> int: ...
    def failure(self, host: int) -> str: ...
    def closed(self, host: int) -> bool: ...
    def counters(self, host: int) -> dict[str, float]: ...
    def violations(self) -> list[str]: ...
    def trace(self) -> list[tuple[int, int, int, str, int, int, int, int, str, int, int]]: ...

class Interface:
    """A network interface of this host.

    mtu: in bytes, 0 when it went away meanwhile. carrier: it is up, and so is its link. addresses:
    IPv4 and IPv6, in the kernel's order, IPv6 link-local ones with "%name".
    """

    @property
    def name(self) -> str: ...
    @property
    def mtu(self) -> int: ...
    @property
    def up(self) -> bool: ...
    @property
    def carrier(self) -> bool: ...
    @property
    def loopback(self) -> bool: ...
    @property
    def addresses(self) -> list[str]: ...

def interfaces() -> list[Interface]:
    """This host's interfaces in the kernel's order; raises OSError."""
