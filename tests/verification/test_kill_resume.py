"""The kill test in short: two real trainings, killed at random moments, keep their bound."""

from verification import kill_resume


def test_killed_trainings_are_charged_within_one_interval(tmp_path):
    rows = kill_resume.run(2, 3, tmp_path)  # asserts the bounds after each kill
    assert len(rows) == 2
    assert all(row["steps"] >= row["begun"] > 0 for row in rows)
