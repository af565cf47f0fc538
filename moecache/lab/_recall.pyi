import numpy as np
from numpy.typing import NDArray

PREDICTORS: tuple[str, ...]

class Recall:
    def __init__(
        self, distances: NDArray[np.int32], widths: NDArray[np.int32], next_row: NDArray[np.int64], num_experts: int
    ) -> None: ...
    @property
    def found(self) -> NDArray[np.int64]: ...
    @property
    def used(self) -> NDArray[np.int64]: ...
    @property
    def binned(self) -> NDArray[np.float64]: ...
