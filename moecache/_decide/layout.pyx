"""How experts are numbered: the global expert id of (layer, expert) and back."""

import cython
import numpy as np

from moecache.errors import RoutingError, refuse_copy

from moecache._decide.arrays cimport address_of


@cython.final
cdef class Layout:
    """Global expert ids (gids) of a model's MoE layers: ``layer_offset[layer] + expert``.

    Parameters
    ----------
    num_experts : int32 array [L]
        Experts of each MoE layer.
    """

    def __cinit__(self, num_experts):
        self.num_experts = np.array(num_experts, np.int32)
        self.num_layers = len(self.num_experts)
        self.layer_offset = np.concatenate([[0], np.cumsum(self.num_experts)]).astype(np.int32)
        self.num_gids = self.layer_offset[-1]
        self.widest = self.num_experts.max(initial=1)
        self.layer_of_gid = np.repeat(np.arange(self.num_layers, dtype=np.int32), self.num_experts)
        self.experts = <int32_t *> address_of(self.num_experts)
        self.offset = <int32_t *> address_of(self.layer_offset)
        self.layer_of = <int32_t *> address_of(self.layer_of_gid)

    def __reduce__(self):
        refuse_copy(self)

    cdef int check_layer(self, int32_t layer) except -1:
        if not 0 <= layer < self.num_layers:
            raise RoutingError(f"layer {layer} is out of range: this cache has MoE layers 0..{self.num_layers - 1}")
        return 0

    def locate(self, int32_t gid):
        """(layer, expert) of a global expert id."""
        if not 0 <= gid < self.num_gids:
            raise RoutingError(f"expert {gid} is out of range: expected 0..{self.num_gids - 1}")
        return int(self.layer_of[gid]), gid - self.offset[self.layer_of[gid]]
