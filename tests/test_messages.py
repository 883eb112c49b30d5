"""The sentences that users read are those of tests/golden/messages.txt."""

from tests.messages import GOLDEN, written


def test_every_sentence_was_reviewed():
    assert written().splitlines() == GOLDEN.read_text().splitlines(), "see the diff of: python -m tests.messages"
