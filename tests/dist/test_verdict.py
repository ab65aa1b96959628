"""Who is to blame, decided from notes alone."""

from __future__ import annotations

from farstep.dist.notes import Activity, Failure, Note
from farstep.dist.verdict import Sight, judge

OWN = Activity("save", group="g", what="files", waits_for=(1, 2))
WAITS = Activity("save", group="g", what="files", waits_for=(0, 2))
WORKS = Activity("save")


def verdict_of(one: Sight, two: Sight, own: Activity = OWN, waited_s: float = 60.0):
    return judge("g", own, {1: one, 2: two}, waited_s, 60.0)


def seen(*activities: Activity, silent_s: float = 0.0, still_s: float = 0.0) -> Sight:
    return Sight(Note(1, activities), silent_s, still_s)


def test_nobody_is_blamed_before_the_deadline() -> None:
    assert verdict_of(Sight(None), Sight(None), waited_s=59.0) is None


def test_who_has_no_note_is_absent_and_who_works_is_not() -> None:
    found = verdict_of(seen(WORKS), Sight(None))
    assert found is not None and found.ranks == found.absent == (2,)
    assert verdict_of(seen(WORKS), seen(WAITS)) is None


def test_a_background_save_of_another_group_does_not_stand_for_the_step() -> None:
    found = verdict_of(seen(WAITS), seen(Activity("async_save", home="beside")))
    assert found is not None and found.absent == (2,)


def test_who_has_not_written_for_long_is_silent() -> None:
    found = verdict_of(seen(WAITS), seen(WORKS, silent_s=61.0))
    assert found is not None and found.silent == (2,)


def test_one_that_waits_in_another_group_may_find_out_first() -> None:
    elsewhere = seen(Activity("save", group="other", what="x", waits_for=(7,)))
    assert verdict_of(seen(WAITS), elsewhere) is None
    found = verdict_of(seen(WAITS), elsewhere, waited_s=121.0)
    assert found is not None and [*found.elsewhere] == [2]


def test_only_those_that_are_waited_for_are_blamed() -> None:
    """A rank that has no messages for this one has gone on."""
    own = Activity("respread", group="g", what="w", waits_for=(1,))
    assert verdict_of(seen(Activity("respread")), Sight(None), own) is None
    waits_for_two = Activity("respread", group="g", what="w", waits_for=(2,))
    found = verdict_of(seen(waits_for_two), Sight(None), own)
    assert found is not None and found.absent == (2,)


def test_all_wait_in_one_operation() -> None:
    """For the same, data are under way. For different things, and nobody moves: for one another."""
    assert verdict_of(seen(WAITS, still_s=500), seen(WAITS, still_s=500), waited_s=500) is None
    other = Activity("save", group="g", what="manifest", waits_for=(0, 1))
    assert verdict_of(seen(WAITS, still_s=61), seen(other, still_s=5)) is None
    found = verdict_of(seen(WAITS, still_s=61), seen(other, still_s=61))
    assert found is not None and found.ranks == (2,)


def test_what_another_found_is_believed_at_once() -> None:
    note = Note(3, (), {"g": Failure("save", "rank 2 has not called it", (2,), 3.03)})
    found = verdict_of(Sight(note), Sight(None), waited_s=1.0)
    assert found is not None and found.ranks == (2,)
    assert found.cause("save", 60.0) == "rank 2 has not called it (as rank 1 found)"
    assert found.cause("load", 60.0) == "in save, rank 2 has not called it (as rank 1 found)"
    assert found.too_late(0, "save", "files") == ""
    assert found.too_late(2, "save", "files") == "rank 2 came too late to save (files): rank 1 gave up after 3 s"
    assert found.too_late(2, "load", "w") == (
        "rank 2 called load (w), but rank 1 waited for it in save and gave up after 3 s"
    )
    assert Note.decode(note.encode().encode()) == note
    assert Note.decode(b"garbage") is None
