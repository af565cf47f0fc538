import numpy as np
from numpy.typing import NDArray

from .._core import Core
from ._clock import LinkClock
from ._recall import Recall

class Replay:
    def __init__(
        self,
        cores: list[Core],
        experts: NDArray[np.int16],
        start: NDArray[np.int64],
        request: NDArray[np.int32],
        decode: NDArray[np.uint8],
        last: NDArray[np.uint8],
        counted: NDArray[np.uint8],
        next_use: NDArray[np.int64] | None = None,
        tables: NDArray[np.int32] | None = None,
        clock: LinkClock | None = None,
        judge: Recall | None = None,
        hints: NDArray[np.float32] | None = None,
    ) -> None: ...
    @property
    def cores(self) -> list[Core]: ...
    @property
    def demands(self) -> NDArray[np.int64]: ...
    @property
    def hits(self) -> NDArray[np.int64]: ...
    def run(self, first: int, end: int) -> None: ...
