"""The number of drafts follows what pays."""

import pytest

from dsa_compile.pace import PROBE, REVIEW, Pace


def run(pace, steps, seconds, rate):
    """Drafts of steps that cost ``seconds[drafts]``; a share ``rate`` of the drafts that are reached is accepted."""
    taken, spread = [], 0.0
    for _ in range(steps):
        drafts = pace.drafts()
        accepted = 0
        while accepted < drafts:
            spread += rate
            if spread < 1:
                break
            spread -= 1
            accepted += 1
        pace.note(drafts, seconds[drafts], [accepted])
        taken.append(drafts)
    return taken


@pytest.mark.parametrize(
    ("seconds", "rate", "best"),
    [
        ([1.0, 1.1, 1.2, 1.3], 0.9, 3),
        ([1.0, 1.1, 2.2, 3.3], 0.9, 1),
        ([1.0, 2.1, 3.2, 4.3], 0.9, 0),
        ([1.0, 1.1, 1.2, 1.3], 0.02, 0),
    ],
    ids=["drafts are cheap", "the second is dear", "all are dear", "hardly any is accepted"],
)
def test_it_settles_where_tokens_come_fastest(seconds, rate, best):
    taken = run(Pace(3), 10 * REVIEW, seconds, rate)
    assert taken[0] == 1
    late = taken[2 * REVIEW :]
    assert late.count(best) > 0.6 * len(late)


def test_it_follows_a_change():
    pace = Pace(2)
    run(pace, 4 * REVIEW, [1.0, 1.1, 1.2], 0.95)
    assert pace.drafts() == 2
    run(pace, 8 * REVIEW, [1.0, 2.5, 4.0], 0.95)
    assert pace.drafts() == 0
    run(pace, 8 * REVIEW, [1.0, 1.1, 1.2], 0.95)
    assert pace.drafts() == 2


def test_a_step_that_was_compiled_is_not_timed():
    pace = Pace(1)
    for drafts in (0, 1):
        pace.note(drafts, 1000.0, [drafts])
        for _ in range(PROBE):
            pace.note(drafts, 1.0, [drafts])
    assert pace.rate(1) == pytest.approx(2.0)
    assert pace.rate(0) == 1.0


def test_a_sequence_that_rejects_a_draft_says_nothing_of_those_behind_it():
    pace = Pace(2)
    for _ in range(2):
        pace.note(2, 1.0, [0, 2])
    assert pace.rate(2) == pytest.approx(1 + 0.5 + 0.5)
