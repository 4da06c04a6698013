import pytest


def refused(message, function, *arguments, kind=ValueError, **options):
    """Assert that a call raises an error of this kind whose message matches."""
    with pytest.raises(kind, match=message):
        function(*arguments, **options)
