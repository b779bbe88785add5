"""The order of training: numbers without end, each once in an epoch, found again from any place on."""

from functools import lru_cache

import numpy as np


class Permutations:
    """The numbers below `size` in a seeded permutation, then in the next one: order[place] for any place from 0 on."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __getitem__(self, place: int) -> int:
        epoch, offset = divmod(place, self.size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.size)
        return int(self._order[offset])


@lru_cache
def shift(ctx_len: int, seed: int, epoch: int) -> int:
    """By how many tokens, fewer than ctx_len, the windows of an epoch begin later than those of the first one."""
    return int(np.random.default_rng((seed, epoch, ctx_len)).integers(ctx_len)) if epoch else 0
