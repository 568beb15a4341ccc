"""Words of a shell script: the time that long ones take."""

from __future__ import annotations

import time

from steptime.launch.shell.lexer import Lexer


def test_a_word_of_any_length_before_a_bracket_is_read_at_once():
    """16,000 letters took 3 s: each was tried as the beginning of an array's name."""
    start = time.process_time()
    assert [token.text for token in Lexer("a" * 60_000 + "()", "run.sh").tokens()] == ["a" * 60_000, "(", ")"]
    assert [token.text for token in Lexer("a" * 60_000 + "=(b c)", "run.sh").tokens()] == ["a" * 60_000 + "=(b c)"]
    assert time.process_time() - start < 1.0
