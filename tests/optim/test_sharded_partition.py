"""How replicated parameters are divided among ranks: everything once, in equal parts."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.optim.partition import GRAIN, Extent, divide

extents = st.lists(
    st.builds(
        Extent,
        numel=st.one_of(st.integers(0, 300), st.integers(0, 200_000)),
        itemsize=st.just(4),
        space=st.integers(0, 1),
        whole=st.booleans(),
        in_one_piece=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(extents, st.integers(1, 9), st.sampled_from([1, 5000, 65536, 16 << 20]))
def test_every_element_has_one_owner_and_travels_in_one_piece(given_extents, ranks, piece_bytes):
    if piece_bytes == 1:
        given_extents = [
            Extent(min(e.numel, 500), 4, e.space, e.whole, e.in_one_piece) for e in given_extents
        ]
    owned = divide(given_extents, ranks, piece_bytes)
    assert len(owned) == ranks
    segments = sorted(
        (s.parameter, s.start, s.stop) for pieces in owned for piece in pieces for s in piece if s.numel
    )
    for number, extent in enumerate(given_extents):
        mine = [(start, stop) for parameter, start, stop in segments if parameter == number]
        edges = [0] * (extent.numel > 0)
        for start, stop in mine:
            assert start == edges[-1]
            edges.append(stop)
        assert not edges or edges[-1] == extent.numel
    for pieces in owned:
        for piece in pieces:
            assert len({given_extents[s.parameter].space for s in piece}) == 1


@settings(max_examples=60, deadline=None)
@given(extents, st.integers(1, 9))
def test_shares_are_equal(given_extents, ranks):
    cut = [Extent(e.numel, 4, e.space) for e in given_extents]
    owned = divide(cut, ranks, 1 << 20)
    for space in {e.space for e in cut}:
        shares = [
            sum(s.numel for piece in pieces for s in piece if cut[s.parameter].space == space)
            for pieces in owned
        ]
        assert max(shares) <= math.ceil(sum(shares) / ranks) + GRAIN


@settings(max_examples=100, deadline=None)
@given(extents, st.integers(1, 9))
def test_a_parameter_that_is_not_to_be_cut_has_one_owner(given_extents, ranks):
    owned = divide(given_extents, ranks, 1000)
    for number, extent in enumerate(given_extents):
        owners = {
            r for r, pieces in enumerate(owned) for piece in pieces for s in piece if s.parameter == number
        }
        assert len(owners) == 1 or not (extent.whole or extent.in_one_piece)


def test_pieces_are_no_larger_than_asked_and_few():
    extents = [Extent(10_000_000, 4, 0), *[Extent(100, 4, 0)] * 1000]
    owned = divide(extents, 2, 4 << 20)
    for pieces in owned:
        assert all(sum(s.numel for s in piece) * 4 <= (4 << 20) + 4 * GRAIN for piece in pieces)
        assert len(pieces) <= 7
