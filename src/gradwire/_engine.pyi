"""Types of the compiled engine (engine/binding). Times are in nanoseconds, sizes in bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradwire.core.errors import Cause

PROTOCOL_VERSION: int
DEFAULT_MEMORY_LIMIT: int
HEADER_BYTES: int
TAG_BYTES: int
CAUSES: list[Cause]

class Plan:
    """One op's plan as all ranks agreed on it; immutable.

    Args:
        elements: Number of float32 elements.
        regions: (offset, length, bound) in elements, in order, covering [0, elements).
        spend: "nothing", "late", "lost" or "anything".
        schedule: (clock, scope, delay_ns, fraction); clock is "open", "first_arrival" or "tail",
            scope "worker" or "all", fraction in [0, 1], or -1 for one minus the region's bound.
        fill: "zero" or "mean".
        order: "shuffled", "sequential", or "priority": by the classes that each worker gives its
            own chunks, shuffled within a class.
        pull: "exact"; "committed", which leaves up to `pull_bound` out alike on all workers;
            "none", where each result stays with its aggregator; or "lossy", where each worker alone
            may miss up to `pull_bound` of each region's results.
        pull_bound: Share of the results that the pull may leave out.
        scale: Factor of each finished sum (1 / world size for an average).
        seed: Seed of the shuffled order.
        encoding: Encoding of pushed chunks and of results: "f32", "f16" (with a power-of-two scale
            per chunk), "bf16" and "half" (as IEEE 754 rounds), "int8" (with a scale per chunk) or
            "topk". Under pull "none" results stay f32.
        kept: Share of each chunk's elements, the largest magnitudes, that "topk" sends.
        class_dscp: DSCPs of the datagrams of each class (order "priority" only), up to 8 from 0 to
            63, the last one for all further classes; empty for the engine's.
        control: "stream", or "probe", where the push and a lossy pull go in passes (not with order
            "priority").
        datagram_bytes: Size of the datagrams that chunks are cut for; 0 for the agreed size, which
            is the largest allowed one.
        shards: Number of elements that each aggregator sums, in order; empty for even shares, which
            end at the nearest chunk.

    Raises:
        ValueError: A field is not as above; the error names it, the value and what is allowed.
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
        shards: Sequence[int] = (),
    ) -> None: ...
    @property
    def elements(self) -> int: ...
    @property
    def hash(self) -> int: ...
    def effective_bounds(
        self, datagram_bytes: int, aggregators: int, engines: int = 1
    ) -> list[float]: ...

def chunk_grid(
    plan: Plan, datagram_bytes: int, aggregators: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Returns element offset, length, region index and aggregator index of each chunk."""

def least_memory_limit(
    plan: Plan, datagram_bytes: int, workers: int, servers: int = 0, engines: int = 1
) -> int:
    """Returns the memory limit of an engine below which a job cannot take an op of this plan."""

def round_trip(
    plan: Plan, values: NDArray[np.float32], datagram_bytes: int, aggregators: int
) -> NDArray[np.float32]:
    """Returns what the other ranks get of these values: each chunk encoded and decoded."""

def keep_encoding_error(
    plan: Plan,
    values: NDArray[np.float32],
    counted: NDArray[np.uint8],
    datagram_bytes: int,
    aggregators: int,
) -> None:
    """Replaces a worker's values, in place, by the part that did not count.

    Chunks that did not count stay as they are. Of the others the encoding's error remains, which is
    0 for f32, and in chunks with a value that is not finite.
    """

def mean_magnitudes(
    values: NDArray[np.float32], offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> NDArray[np.float32]:
    """Returns each chunk's mean magnitude; infinite where the sum is not finite.

    Raises:
        ValueError: A chunk reaches beyond the values.
    """

def square_sums(values: NDArray[np.float32], starts: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns the sums of the squares from each start to the next, and from the last to the end.

    A sum is not finite only where an element is not.

    Raises:
        ValueError: The starts are not in order.
    """

def write_chunks(
    values: NDArray[np.float32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    source: NDArray[np.float32],
    begin: int,
    factor: float,
) -> None:
    """Writes the chunks' elements that `source` holds, from `begin` on, times `factor`, in place.

    Raises:
        ValueError: A chunk reaches beyond the values.
    """

def chunk_elements(encoding: str, kept: float, datagram_bytes: int) -> int:
    """Returns the largest number of elements that one datagram carries."""

def encode_chunk(values: NDArray[np.float32], encoding: str, kept: float = 1.0) -> bytes:
    """Returns the payload of one chunk."""

def decode_chunk(
    payload: bytes, elements: int, encoding: str, kept: float = 1.0
) -> NDArray[np.float32]:
    """Returns the values of one chunk; raises ValueError for an invalid payload."""

HADAMARD_BLOCK: int
"""Number of elements of a block of `hadamard`."""

def hadamard(values: NDArray[np.float32], seed: int, inverse: bool = False) -> None:
    """Applies the randomised Hadamard transform, or its inverse, in place.

    Signs are drawn from the seed. Then each block is transformed orthonormally, and the rest in
    blocks of ever smaller powers of two.
    """

class Failure:
    """The reason why an engine has failed."""

    text: str
    rank: int  # the endpoint at fault, -1 for none
    cause: Cause

class Peer:
    """What an engine knows of another one with which it exchanges data."""

    endpoint: int
    answered: bool  # whether it has answered a ping of full length
    heard: bool  # whether any packet has come from it
    left: bool  # whether it has said goodbye
    silence_ns: int  # time since then, or since the engines met
    def path(self) -> dict[str, float]:
        """Returns the totals and the present state of the path to it.

        The packets and bytes sent and received, retransmissions (chunks), declared_lost (packets),
        and waited_ns, for which ops that had started here waited for it to start them. Now:
        rtprop_ns, round_ns (smoothed), queue_to_ns, loss_to and loss_from (shares of packets),
        window (bytes of its receive window for this engine, 0 while not known) and in_flight
        (packets).
        """
    def has_begun(self, op: int, lane: int = 0) -> bool:
        """Returns whether it is known to have started this op; False for servers."""

class Completion:
    """The outcome of one op."""

    op: int  # its number in its lane
    lane: int
    step: int
    ok: bool
    error: str  # "" when ok; names rank, step and cause
    error_rank: int  # the endpoint at fault, -1 for none
    error_cause: Cause
    counted: NDArray[np.uint8]  # per chunk: 1 where this worker's contribution counted
    applied: NDArray[np.uint8]  # per chunk: 1 where a result was applied, 0 where it is zero
    # Under a committed pull on the sharded route: the chunks of this rank's shard whose result was
    # not applied, and these results, scaled and concatenated. The rank keeps them as its residual.
    withheld_chunks: NDArray[np.uint32]
    withheld_values: NDArray[np.float32]
    error_offset: int  # the first element of take_result_error
    delivered: list[float]  # per region: fraction of this worker's elements that counted
    exceeded: list[int]  # regions whose loss exceeded their bound (plans by time only)
    stats_sum: list[float]  # the first four statistics, summed over the workers in rank order
    stats_max: list[float]  # the last four, maximised
    push_ns: int  # from the start until this worker's last contribution was decided
    pull_ns: int  # from the first result until the end
    total_ns: int
    bytes_sent: int  # UDP payload that this engine sent for this op
    packets_sent: int
    retransmissions: int
    passes: int  # of the push, the most of any shard; 0 under control "stream"
    datagram_bytes: int  # the longest that all paths carry, the same on all workers
    rtprop_ns: int  # the smallest of all paths in the last 10 s
    btlbw: float  # the engine's estimate of the bottleneck in bytes per second
    # What it waited for, as (endpoint, -1 for none; value): who began, contributed and answered
    # last (ns since its start), the longest queueing (ns); packets resent, missed, in one burst.
    waits: list[tuple[int, int]]

    def take_result_error(self) -> NDArray[np.float32]:
        """Hands over the encoding's error in the scaled results of this rank's shard.

        It has all elements of the shard, from error_offset on (sharded route only). The rank keeps
        it as its residual. The second call returns an empty array.
        """

class Engine:
    """One UDP engine of this process, whose threads never take the GIL.

    It has one thread and one socket, or several that divide the chunks of every op among them.

    Endpoints 0 … workers - 1 are the workers (ranks), then the servers; servers=0 is the sharded
    route.

    Raises:
        OSError: The address is in use, or is none of this host.
        ValueError: An argument is not allowed.
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
        drop_rate: float = 0.0,  # injected loss of DATA packets in the receive path
        drop_burst: float = 1.0,  # mean length of a run of losses (Gilbert-Elliott)
        drop_seed: int = 0,
        dscp: int = 0,  # for datagrams to which no plan gives another
        ecn: bool = True,  # ECT(0) on acknowledged packets, where kernel and path carry it
        ranks: Sequence[int] = (),  # the workers' ranks in texts; empty for 0, 1, 2, …
        auth: str = "none",  # or "headers", "whole", "secret": what of a datagram its tag covers
        cipher: str = "aes-128-gcm",  # or "chacha20-poly1305"
        # By endpoint: to there, from there; first all of the first thread, then those of the next.
        secrets: Sequence[tuple[bytes, bytes] | None] = (),
        engines: int = 1,  # threads, alike at all endpoints
        ports: Sequence[int] = (),  # instead of port: those to try in order
    ) -> None: ...
    @property
    def address(self) -> tuple[str, int]:
        """The address of the first thread's socket."""
    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The address of each thread's socket."""
    def connect(self, *addresses: Sequence[tuple[str, int]]) -> None:
        """Takes the addresses of all endpoints in order (own included), and starts the pings.

        Args:
            addresses: One list for each thread: those of the other endpoints' same thread.
        """
    def wait_connected(self, timeout_ns: int) -> list[int]:
        """Waits without the GIL until every endpoint answered; returns those that have not."""
    def all_reduce(
        self,
        *,
        op: int,
        lane: int = 0,
        step: int,
        plan: Plan,
        data: NDArray[np.float32] | NDArray[np.uint16],
        critical: NDArray[np.uint32] | None = None,  # chunk ids that must count
        priorities: NDArray[np.uint8] | None = None,  # class of each chunk, 0 (first) to 7
        stats: Sequence[float] = (),  # up to 8: first four are summed, last four maximised
        timeout_ns: int = 1_800_000_000_000,
        timeout_from: str = "",  # origin of the time-out, for the text of an error
    ) -> None:
        """Starts one op in place; thread-safe, never blocks.

        The caller keeps `data` alive and untouched until the Completion. The ops of a lane are
        numbered 0, 1, 2, … alike on all workers; those of different lanes may start in any order.
        Data of uint16 are the bits of the numbers that the plan's encoding sends, half or bf16.

        Raises:
            ValueError: The data do not fit the plan.
            RuntimeError: The engine has failed or is closed.
        """
    def next_completion(self, timeout_ns: int) -> Completion | None:
        """Waits without the GIL for the next Completion; None at the time-out or once closed."""
    def set_drop(self, rate: float, burst: float = 1.0, seed: int = 0) -> None:
        """Injects loss in the receive path, for tests and demonstrations."""
    def counters(self) -> dict[str, float]:
        """Returns counters: packets and bytes, retransmissions, drops, rtprop_ns, btlbw, …."""
    def peers(self) -> list[Peer]:
        """Returns what this engine knows of each peer with which it exchanges data."""
    def record(self, entries: int) -> list[list[tuple[int, str, int | None, int]]]:
        """Keeps so many entries of each thread's timeline from now on; 0 for none.

        Returns:
            The entries of each thread since the last call: when, what, with which endpoint or none,
            and a value (engine/proto/base/timeline.h says which); times and durations in
            nanoseconds.
        """
    def refusal(self) -> str:
        """Returns why the kernel refused datagrams, and how many; "" where it refused none."""
    def features(self) -> dict[str, bool | int]:
        """Returns what the kernel granted, and what was asked for.

        Keys are udp_segment, udp_gro, rcvbuf, sndbuf, timestamps, dscp and ecn, and for what was
        asked for rcvbuf_asked and sndbuf_asked in bytes.
        """
    def failure(self) -> Failure | None:
        """Returns why the engine can no longer serve, such as a dead peer; None while it can."""
    def fail(self, why: str) -> None:
        """Fails the engine for a reason of the caller's, which the peers are told."""
    def leave_to_parent(self) -> None:
        """Closes the socket in a forked child, so that the parent's close ends it."""
    def close(self) -> None:
        """Notifies the peers, joins the thread, fails open ops. Idempotent."""

def version() -> str: ...

class Link:
    """One direction of a port in virtual time; see `gradwire.sim.fabric.Link`.

    Raises:
        ValueError: An argument is not allowed.
    """

    def __init__(
        self,
        *,
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
        corrupt: float = 0.0,
        ecn_bytes: int = 0,
        bleach: bool = False,
        drop_ect: bool = False,
        longest: int = 0,
        police_rate: float = 0.0,
        police_burst: int = 65_536,
    ) -> None: ...

class Fabric:
    """Endpoints in virtual time on one switch; `gradwire.sim.fabric` wraps it with seconds.

    A direction is "up" (host to switch) or "down" (switch to host, the port that incast fills).
    Rates are bytes per second on the wire.

    Raises:
        ValueError: An argument is not allowed.
    """

    def __init__(
        self,
        *,
        workers: int,
        servers: int = 0,
        seed: int = 0,
        link: Link = ...,
        ecn: bool = True,
        overhead: int = 42,
        whole_trains: bool = False,
        host_delay_ns: int = 0,
        host_jitter_ns: int = 0,
        send_time_ns: int = 0,
        datagram_bytes: int = 1472,
        peer_timeout_ns: int = 30_000_000_000,
        ping_interval_ns: int = 1_000_000_000,
        receive_buffer: int = 1_048_576,
        memory_limit: int = 2_147_483_648,
        pacing: bool = True,
        session: int = 1,
        trace_limit: int = 0,
        most_events: int = ...,
        beside: Fabric | None = None,
        engine: int = 0,
        engines: int = 1,
    ) -> None: ...
    @property
    def now_ns(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def trace_hash(self) -> int: ...
    def set_link(self, host: int, direction: str, link: Link) -> None: ...
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
        train: int = 1,
    ) -> None: ...
    def add_flow(
        self,
        host: int,
        direction: str = "down",
        *,
        start_ns: int = 0,
        end_ns: int = -1,
        round_ns: int = 200_000,
    ) -> int: ...
    def flow(self, index: int) -> dict[str, int]: ...
    def set_clock(self, host: int, ppm: float) -> None: ...
    def jump_clock(self, host: int, by_ns: int) -> None: ...
    def pause(self, host: int) -> None: ...
    def resume(self, host: int, clock_stood: bool = False) -> None: ...
    def restart(self, host: int, session: int) -> None: ...
    def cut(self, source: int, destination: int, cut: bool = True) -> None: ...
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
    def run_beside(self, other: Fabric, until_ns: int) -> None: ...
    @staticmethod
    def run_together(fabrics: Sequence[Fabric], until_ns: int) -> bool: ...
    def completion(self, worker: int, op: int, lane: int = 0) -> Completion | None: ...
    def result(self, worker: int, op: int, lane: int = 0) -> NDArray[np.float32]: ...
    def finished_at_ns(self, worker: int, op: int, lane: int = 0) -> int: ...
    def failure(self, host: int) -> str: ...
    @property
    def met(self) -> bool: ...
    def unheard_ns(self, source: int, destination: int) -> int: ...
    def closed(self, host: int) -> bool: ...
    def counters(self, host: int) -> dict[str, float]: ...
    def record(self, host: int, entries: int) -> list[tuple[int, str, int | None, int]]: ...
    def violations(self) -> list[str]: ...
    def trace(self) -> list[tuple[int, int, int, str, int, int, int, int, str, int, int]]: ...

class Interface:
    """A network interface of this host.

    Attributes:
        mtu: MTU in bytes, 0 when the interface has gone.
        carrier: Whether it is up, and so is its link.
        addresses: IPv4 and IPv6 addresses in the kernel's order, IPv6 link-local ones with "%name".
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
    """Returns this host's interfaces in the kernel's order; raises OSError."""

def load_libcrypto(names: Sequence[str] = ()) -> str:
    """Loads libcrypto from the first of these files, or of its usual names, that there is.

    Returns:
        Its version.

    Raises:
        RuntimeError: There is none.
    """

def has_aes() -> bool:
    """Returns whether the processor has instructions for AES-GCM."""

def hkdf_extract(salt: bytes, key: bytes) -> bytes:
    """Returns HKDF-Extract (RFC 5869) with SHA-256; neither may be empty."""

def hkdf_expand_label(secret: bytes, label: str, context: bytes, size: int = 32) -> bytes:
    """Returns HKDF-Expand-Label (RFC 8446, section 7.1), with gradwire's own prefix."""

def x25519_public(own: bytes) -> bytes:
    """Returns the public key of a private one (RFC 7748)."""

def x25519(own: bytes, peer: bytes) -> bytes:
    """Returns what two keys share; raises ValueError for a public key that yields nothing."""
