"""Settings that all tests share."""

from hypothesis import settings

# The same examples in every run; `pytest --hypothesis-profile=explore` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
