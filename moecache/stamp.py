"""Whether a file is still what it was: inode, size and time of modification."""

from __future__ import annotations

import os
from typing import NamedTuple

from .errors import CheckpointError

__all__ = ["Stamp", "changed", "check_unchanged"]


class Stamp(NamedTuple):
    """What distinguishes a file from another one, and from itself after somebody has written to it."""

    inode: int
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


def check_unchanged(file: str, stamp: Stamp) -> None:
    """Raise CheckpointError, saying how, if a file is not any more what it was when the stamp was taken."""
    try:
        now = Stamp.of(os.stat(file))
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read any more ({error.strerror}); put it back and build the bank again"
        ) from error
    if now != stamp:
        raise changed(file, stamp, now)


def changed(file: str, stamp: Stamp, now: Stamp) -> CheckpointError:
    """The error that says how a file has changed."""
    if now.inode != stamp.inode:
        how = "it has been replaced by another file"
    elif now.nbytes != stamp.nbytes:
        how = f"it had {stamp.nbytes} bytes, and has {now.nbytes}"
    elif now.modified_ns != stamp.modified_ns:
        how = f"it was modified {(now.modified_ns - stamp.modified_ns) / 1e9:+.3f} s away from the state that was read"
    else:
        how = "it was written to while it was read"
    return CheckpointError(f"{file}: changed since its header was read: {how}; build the bank again from whole files")
