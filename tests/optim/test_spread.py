"""However the parameters are spread over workers and groups, the same training comes out."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import optim

from farstep.optim import DistributedOptimizer

from .spread import Spread, train


@given(
    places=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6),
    rates=st.lists(st.floats(0.01, 0.3), min_size=3, max_size=3),
    resting=st.sets(st.integers(0, 5)),
    max_norm=st.sampled_from([None, 0.5, 100.0]),
    kind=st.sampled_from([optim.Adam, optim.SGD, optim.RMSprop]),
)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_spread(three, places, rates, resting, max_norm, kind):
    """places: the owner and the group of each parameter; resting: those that get no gradient in the second step."""
    spread = Spread([owner for owner, _ in places])
    numbers = sorted({group for _, group in places})

    def groups(params):
        return [
            {
                "params": [p for p, (_, g) in zip(params, places, strict=True) if g == number],
                "lr": rates[number],
            }
            for number in numbers
        ]

    def of(step):
        left = [i for i in range(len(places)) if step != 1 or i not in resting]
        return left or [0]

    optimizer = DistributedOptimizer(kind, groups(spread.rrefs), lr=0.1)
    ordinary = kind(groups(spread.local), lr=0.1)
    train(spread, optimizer, ordinary, 3, max_norm=max_norm, of=of)
    spread.assert_same()
    saved = optimizer.state_dict()
    assert [len(group["params"]) for group in saved["param_groups"]] == [
        len(group["params"]) for group in ordinary.param_groups
    ]
