"""How an error names what the user probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(given: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'rowwise'?)"` for a near miss among `known`, else an empty string."""
    matches = get_close_matches(given, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
