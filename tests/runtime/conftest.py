from processes import gloo  # noqa: F401  a fixture
