from octavo.planner.forecast import _duration


def test_seconds_are_seconds():
    assert [_duration(s) for s in (42.73, 1.0, 0.9994, 0.0123)] == ["42.7 s", "1.0 s", "999.4 ms", "12.3 ms"]
