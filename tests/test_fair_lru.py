"""Tests of the order in which a cache shared by several owners evicts entries."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rwkv.fair_lru import FairLRU

SIZE = 10


def test_an_owner_with_exactly_its_share_loses_nothing() -> None:
    lru = FairLRU[int]()
    for key, owner in enumerate("aabbb"):
        lru.add(key, owner, SIZE)
    assert lru.victim(4 * SIZE) == 2, "the oldest of b, which has more than half"


@given(st.integers(SIZE, 12 * SIZE), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_no_owner_loses_its_share_and_a_single_owner_may_use_everything(most: int, steps: list[tuple[str, bool]]) -> None:
    shares, last_use, owners = FairLRU[int](), dict[int, int](), dict[int, str]()
    for number, (owner, again) in enumerate(steps):
        mine = [key for key in shares if owners[key] == owner]
        if again and mine:
            shares.use(mine[0])
            last_use[mine[0]] = number
            continue
        owners[number] = owner
        shares.add(number, owner, SIZE)
        last_use[number] = number
        while shares.total > most:
            counts = Counter(owners[key] for key in shares)
            key = shares.victim(most)
            assert key != number or len(shares) == 1
            assert counts[owners[key]] * SIZE > most / len(counts)
            assert last_use[key] == min(last_use[other] for other in shares if owners[other] == owners[key])
            shares.remove(key)
        assert shares.total == SIZE * len(shares) <= most
