"""The links of the lab (engine/binding/link.cc). Times are nanoseconds, rates bytes per second."""

class LinkQueue:
    """One direction of the lab's own link, in virtual time: a rate with a drop-tail queue, then a
    wire with loss, delay and jitter.

    headed: frames have a virtio-net header before them and may be trains, which count as their
    packets and are cut where packets are lost. `set` takes all options anew: delay_ns; jitter_ns
    (each frame takes up to so much longer, uniformly; keep_order: but overtakes none); rate in
    bytes/s (0: none) and the queue before it; ecn_bytes, the occupancy of that queue above which
    ECT packets that arrive are marked CE (RFC 3168; 0: none are); loss, a share in [0, 1] (1: cut);
    loss_burst, the mean length of a run of losses (0: independent), at least loss / (1 - loss);
    memory_bytes, the most that is held. Raises ValueError naming the option, the value and what is
    allowed.
    """

    def __init__(self, *, headed: bool = False, seed: int = 0) -> None: ...
    def set(
        self,
        now: int,
        *,
        delay_ns: int = 0,
        jitter_ns: int = 0,
        keep_order: bool = True,
        rate: float = 0.0,
        queue_bytes: int = 0,
        ecn_bytes: int = 0,
        loss: float = 0.0,
        loss_burst: float = 0.0,
        memory_bytes: int = ...,
    ) -> None: ...
    def offer(self, now: int, frame: bytes) -> None: ...
    def take(self, now: int) -> bytes | None:
        """The next frame that has arrived by now."""

    def next_event(self) -> int | None:
        """When there will be something to take or to do; None when nothing is on its way."""

    def counters(self) -> dict[str, int]: ...

class TapLink:
    """The lab's own link: a thread between two TAP devices, one LinkQueue for each direction.

    first, second: descriptors of TAP devices, both with virtio-net headers (headed) or both
    without; they are duplicated. Direction 0 goes from the first to the second. Raises OSError.
    """

    def __init__(self, first: int, second: int, *, headed: bool = True, seed: int = 0) -> None: ...
    def set(
        self,
        direction: int,
        *,
        delay_ns: int = 0,
        jitter_ns: int = 0,
        keep_order: bool = True,
        rate: float = 0.0,
        queue_bytes: int = 0,
        ecn_bytes: int = 0,
        loss: float = 0.0,
        loss_burst: float = 0.0,
        memory_bytes: int = ...,
    ) -> None:
        """Options as of `LinkQueue.set`; they are in force on return. RuntimeError: it ended."""

    def counters(self, direction: int) -> dict[str, int]: ...
    def processor_time_ns(self) -> int:
        """What the thread has taken, for both directions."""

    def failure(self) -> str:
        """Why the thread ended by itself; "" while all is well."""

    def close(self) -> None: ...
