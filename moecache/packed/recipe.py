"""How one matrix of an expert is decoded from its packed bytes, as the engine is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError

__all__ = ["Recipe"]

MOST_STREAMS = 4


@dataclass(frozen=True, eq=False)
class Recipe:
    """How one matrix is decoded, a run of rows at a time, by a loop of machine code.

    The loop is called without the GIL, on any thread, by several at once for different rows::

        void decode(const uint8_t **streams, const int64_t *numbers, const uint8_t *table, int64_t first, int64_t rows,
                    uint8_t *out)

    It decodes `rows` rows from row `first` on, a multiple of `quantum`, of the matrix that begins at `out`. Each of the
    streams begins with what row `first` needs of it, at any alignment.

    Parameters
    ----------
    decoder : int
        The loop's address.
    rows : int
        Of the matrix as it is packed.
    quantum : int
        Rows are decoded in multiples of it, but for the last.
    streams : tuple of (int, int)
        For each stream, in order, (step, nbytes): `step` rows have `nbytes` bytes in it. At most four.
    numbers : int64[n]
        What else the loop needs to know, in an order of its own.
    table : uint8[m], optional
        The same, of more values.
    owner
        Kept alive with the recipe: what the loop's address belongs to.

    Raises
    ------
    CheckpointError
        A number is out of range.
    """

    decoder: int
    rows: int
    quantum: int
    streams: tuple[tuple[int, int], ...]
    numbers: NDArray[np.int64]
    table: NDArray[np.uint8] | None = None
    owner: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        sound = all(step > 0 and nbytes > 0 for step, nbytes in self.streams)
        if self.rows < 1 or self.quantum < 1 or not 1 <= len(self.streams) <= MOST_STREAMS or not sound:
            raise CheckpointError(
                f"a matrix of {self.rows} rows, decoded {self.quantum} at a time from streams {self.streams}, cannot be: "
                f"expected numbers above 0 and at most {MOST_STREAMS} streams"
            )

    def nbytes(self, stream: int) -> int:
        """Bytes of a whole stream."""
        step, nbytes = self.streams[stream]
        return -(-self.rows // step) * nbytes

    @property
    def packed_nbytes(self) -> int:
        """Bytes of all streams."""
        return sum(self.nbytes(stream) for stream in range(len(self.streams)))

    def chunk_rows(self, chunk_nbytes: int) -> int:
        """Rows whose packed bytes are about so many, a multiple of the quantum and at least one."""
        fitting = chunk_nbytes * self.rows // self.packed_nbytes
        return min(max(fitting // self.quantum, 1) * self.quantum, self.rows)
