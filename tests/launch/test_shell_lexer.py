"""Words of a shell script: the time that long ones take."""

from __future__ import annotations

import time

import pytest

from steptime.launch.shell.lexer import Lexer


def test_a_word_of_any_length_before_a_bracket_is_read_at_once():
    """16,000 letters took 3 s: each was tried as the beginning of an array's name."""
    start = time.process_time()
    assert [token.text for token in Lexer("a" * 60_000 + "()", "run.sh").tokens()] == ["a" * 60_000, "(", ")"]
    assert [token.text for token in Lexer("a" * 60_000 + "=(b c)", "run.sh").tokens()] == ["a" * 60_000 + "=(b c)"]
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run --tp <TP>\\\n --pp 2", ["run", "--tp", "'<TP>'", "--pp", "2"]),
        ("run --data <path to data> --tp 2", ["run", "--data", "'<path to data>'", "--tp", "2"]),
        ("TP=<your tp>; run", ["TP=<your tp>", ";", "run"]),
        ("run <in >out", ["run", "<", "in", ">", "out"]),
        ("run <in 2> out", ["run", "<", "in", ">", "out"]),
        ("run <file>out", ["run", "<", "file", ">", "out"]),
    ],
)
def test_words_to_be_filled_in_are_no_redirections(text, words):
    """A template's words in angle brackets are one word; a file's name after each sign is a redirection, as in bash."""
    assert [token.text for token in Lexer(text, "run.sh").tokens()] == words
