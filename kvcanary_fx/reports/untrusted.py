"""Text from outside, such as a request's id, in our lines."""

from __future__ import annotations

import json


def one_line(value: object) -> str:
    """Untrusted text, such as an id, without control characters: it can neither forge a line nor colour it."""
    text = str(value)
    return text if text.isprintable() else json.dumps(text)


def one_word(value: object) -> str:
    """The same as one word of a line: a JSON string if it is empty or has spaces or quotes."""
    text = one_line(value)
    plain = bool(text) and not any(c.isspace() or c in '"=' for c in text)
    return text if plain or text != str(value) else json.dumps(text)
