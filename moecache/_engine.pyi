from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from .packed.recipe import Recipe

@dataclass(frozen=True, eq=False)
class Sources:
    segment_start: NDArray[np.int64]
    segment_file: NDArray[np.int32]
    segment_source: NDArray[np.uint64]
    segment_nbytes: NDArray[np.int64]
    segment_region: NDArray[np.int32]
    segment_offset: NDArray[np.int64]
    files: tuple[str, ...] = ()
    stamps: tuple[tuple[int, int, int], ...] = ()
    tensors: tuple[Any, ...] = ()
    tensor_address: NDArray[np.uint64] | None = None
    segment_tensor: NDArray[np.int32] | None = None
    recipes: tuple[Recipe, ...] = ()
    segment_recipe: NDArray[np.int32] | None = None
    name_of: Callable[[int], str] = ...

class _Link:
    @property
    def asynchronous(self) -> bool: ...
    @property
    def in_use(self) -> bool: ...

class HostLink(_Link):
    def __init__(self) -> None: ...

class FileLink(_Link):
    def __init__(self, direct: bool = True) -> None: ...

class ThrottledLink(_Link):
    def __init__(
        self,
        inner: _Link,
        bytes_per_s: float,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        seed: int = 0,
    ) -> None: ...

class FaultyLink(_Link):
    def __init__(
        self,
        inner: _Link,
        *,
        fail_at: int = 0,
        fails: int = 1,
        fail_every: int = 0,
        error: int = ...,
        stage: str = "copy",
        short_copy_at: int = 0,
        delay_s: float = 0.0,
        short_read: int = 0,
        refuse_direct: bool = False,
        end_thread_at: int = 0,
        stall_at: int = 0,
        stall_landed: bool = False,
    ) -> None: ...
    def release(self, chunks: int = ...) -> None: ...
    @property
    def chunks(self) -> int: ...

def cuda_message(code: int) -> str: ...
def time_copies(nbytes: int, rounds: int) -> list[float]: ...

class CudaLink(_Link):
    def __init__(
        self,
        *,
        memcpy_async: int,
        event_record: int,
        event_query: int,
        stream_wait_event: int,
        set_device: int,
        exchange_capture_mode: int,
        device: int,
        stream: int,
        events: NDArray[np.uint64],
        read_event: NDArray[np.uint64],
        copy_event: NDArray[np.uint64],
        locked: NDArray[np.uint64] | None = None,
        staging: int = 0,
        staging_nbytes: int = 0,
        direct: bool = True,
        owner: object = None,
    ) -> None: ...
    def before_reading(self, slots: NDArray[np.int32], stream: int) -> int: ...
    def is_fresh(self, slot: int) -> bool: ...
    def mark_readers(self, slots: NDArray[np.int32], stream: int) -> None: ...
    @property
    def reads_files(self) -> bool: ...

class Pause:
    """A pause of an engine, until `end` or until it is dropped."""

    def end(self) -> None: ...

class Engine:
    """Moves experts into slots.

    A job is (source, slot, generation). Jobs wait in two levels, demand before prefetch; they travel in chunks, and at
    each chunk boundary a prefetch can be dropped or overtaken by a demand, and goes on later where it stopped. Several
    threads, waiting callers among them, may copy chunks of one job at the same time.
    ``complete[slot]`` becomes the generation, with release order, when the slot's bytes are all there, and its negative
    when the copy failed. A slot's next generation begins only when an earlier one's copy into it has stopped.

    Parameters
    ----------
    sources
        Where the bytes lie. The destination of a segment is
        ``region_address[region] + slot * region_stride[region] + segment_offset`` (64-bit wrap-around).
    region_address : uint64[R]
    region_stride : int64[R]
        Address of each region and bytes from one slot to the next.
    complete : int32[slots]
        The caller's array, written by the engine only.
    link
        What to copy over; ``None``: files are read with `FileLink`, memory is copied with `HostLink`.
    threads
        I/O threads, 1 to 64. An asynchronous link always has one.
    chunk_bytes, window_bytes
        Size of a chunk, and how many bytes may be outstanding on an asynchronous link (at least one chunk may). Chunks are
        of 2 MiB by default; between host memory, of what :mod:`moecache.copying` found to be best.
    owner
        Kept alive as long as a copy may be running: whatever owns the memory at both ends.
    replaces
        An idle engine over the same link that is closed right after: an asynchronous link serves one at a time.

    Raises
    ------
    ValueError
        Arrays that do not fit each other; a number out of range; a link that cannot read files or that serves
        another engine.
    TransferError
        A file cannot be opened.
    CheckpointError
        A file is not what its stamp says.
    OSError
        No thread can be started.
    """

    def __init__(
        self,
        sources: Sources,
        region_address: ArrayLike,
        region_stride: ArrayLike,
        complete: NDArray[np.int32],
        *,
        link: _Link | None = None,
        threads: int = 1,
        chunk_bytes: int | None = None,
        window_bytes: int = ...,
        owner: object = None,
        replaces: Engine | None = None,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    def submit(
        self,
        fetch: NDArray[np.int32] | None = None,
        prefetch: NDArray[np.int32] | None = None,
        priority: NDArray[np.float32] | None = None,
        drop: NDArray[np.int32] | None = None,
    ) -> None:
        """Take a plan, in the order drops, fetches, prefetches; ``None`` means no rows.

        A job that is already live is joined, and by a fetch raised to demand level; one that is complete stays as it
        is; one that failed is tried again. A generation older than the newest seen for its slot is ignored, and so is
        a prefetch of a dropped one (a fetch of it begins anew).

        Parameters
        ----------
        fetch, prefetch : int32[n, 3]
            Rows (source, slot, generation), C-contiguous.
        priority : float32[n]
            Of the prefetches; larger goes first, equal ones in the order given.
        drop : int32[n, 2]
            Rows (slot, generation): copies no longer wanted.

        Raises
        ------
        RoutingError
            An unknown source or slot; nothing has been queued.
        ClosedError, TransferError
            The engine is closed or belongs to another process; an I/O thread has ended.
        """
    def wait_any(self, slots: NDArray[np.int32], generations: NDArray[np.int32], timeout: float) -> int:
        """Position of one that is complete. The calling thread copies a queued one itself where the link allows that.

        Parameters
        ----------
        slots, generations : int32[n]
        timeout
            Seconds. A caller that copies a chunk itself, which it does from memory only, finishes that first.

        Raises
        ------
        TransferError
            None is complete and one failed (``__cause__`` is the original error), was dropped or displaced; or the time
            is over; or an I/O thread has ended (both with `describe`'s lines). ``position`` and ``source`` say which one
            it is about. The cause is a CheckpointError where a file, or the memory of a tensor, is not any more what it
            was.
        RoutingError
            Arrays of different length, an unknown slot, nothing to wait for, or a timeout that is not a number.
        ClosedError
            The engine is closed, also when that happens during the wait.
        """
    def wait_all(self, slots: NDArray[np.int32], generations: NDArray[np.int32], timeout: float) -> None:
        """Like `wait_any`, until all are complete or one cannot be."""
    def drain(self, timeout: float) -> None:
        """Wait until nothing is queued or moving.

        Raises
        ------
        TransferError
            The time is over, or an I/O thread has ended; the message ends with `describe`'s lines.
        RoutingError
            A timeout that is not a number.
        ClosedError
        """
    def pause(self, timeout: float) -> None:
        """Let no chunk start until `resume`, and return when none moves any more.

        Meanwhile jobs are taken, joined and dropped as ever, waits wait, and closing works; a link's functions are not
        called, so that a CUDA graph can be captured. Pauses add up: each needs its own `resume`.

        Parameters
        ----------
        timeout
            Seconds for the chunks that move to land.

        Raises
        ------
        TransferError
            They have not, or an I/O thread has ended; the engine is not paused by this call then.
        RoutingError
            A timeout that is not a number.
        ClosedError
        """
    def hold(self, timeout: float) -> Pause:
        """Like `pause`; it ends with the returned object's ``end()``, or when that object is dropped.

        Raises
        ------
        TransferError, RoutingError, ClosedError
            As `pause`.
        """
    def hand_pauses_to(self, other: Engine) -> None:
        """Pause another engine, which takes this one's place, as often as this one is, and let `hold`'s pauses end there."""
    def resume(self) -> None:
        """End one `pause`.

        Raises
        ------
        TransferError
            There is none to end.
        ClosedError
        """
    def move_region(
        self, region: int, address: int, tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor
    ) -> None:
        """Let a region begin elsewhere from now on, and ``tensors[name]`` be the tensor that lies there, in one step.

        Raises
        ------
        TransferError
            Copies are under way.
        RoutingError, ClosedError
        """
    def describe(self) -> str:
        """Lines for people: jobs in the order they will be served (level, state, slot, generation, bytes there), who
        moves what, who waits.

        Raises
        ------
        ClosedError
        """
    @property
    def link_rate(self) -> float:
        """Bytes/s of the link while it moves something, all threads together; 0.0 before anything has moved.

        Recent: what happened 0.25 s of busy time ago counts for 1/e. Read without a lock, at any time, also when the
        engine is closed.
        """
    def counters(self) -> dict[str, int]:
        """Sums since the start or the last `reset_counters`, 64-bit.

        ``bytes_demand``, ``bytes_prefetch``
            Bytes that travelled, by the level of the job when they arrived (those of dropped copies too).
        ``jobs_demand``, ``jobs_prefetch``
            Jobs completed, by their last level.
        ``joined``
            Prefetches raised to demand before they were complete.
        ``prefetch_dropped``, ``prefetch_cancelled``
            Prefetches dropped before they began; after that, at a chunk boundary.
        ``failed``
        ``stall_ns``, ``busy_ns``, ``reading_ns``
            Time callers waited; time the link was in use (summed over threads that copy at once); the part of it in which
            it read files.
        ``direct_reads``, ``buffered_reads``
            Reads of files past the page cache, and through it.
        ``helped``
            Chunks copied by waiting callers.
        """
    def reset_counters(self) -> None: ...
    def close(self) -> None:
        """Drop what is queued, stop what moves at the next chunk boundary, join the threads, close the files.

        Idempotent; does nothing in a forked child.
        """
    def __enter__(self) -> Engine: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
