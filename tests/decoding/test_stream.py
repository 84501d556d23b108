"""Answers as they are written: the same tokens as all at once, told apart by who wrote them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_draft, tiny_target
from tiny_tokenizers import make_tokenizer

from dspark_train.decoding.decoder import Decoder, generate
from dspark_train.decoding.stream import Chunk, Detokenizer, Pace, stream
from dspark_train.errors import UserError

PROMPT = [1, 7, 9, 23]


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    return target, tiny_draft(target)


def test_chunks_are_the_answer(pair):
    target, draft = pair
    whole = generate(target, draft, [PROMPT], max_new_tokens=24)
    pace = Pace()
    chunks = list(stream(Decoder(target, draft), PROMPT, 24, pace=pace))
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens[0]
    assert chunks[-1].finished_by == whole.finished_by[0]
    assert {chunk.finished_by for chunk in chunks[:-1]} == {""}
    assert [chunk.drafted for chunk in chunks[1:-1]] == whole.trace.accepted[:-1].tolist()
    assert pace.rounds == len(chunks) - 1
    assert pace.accepted_length == (len(whole.tokens[0]) - 1) / pace.rounds


def test_plain_decoding_drafts_nothing(pair):
    target, _ = pair
    pace = Pace()
    chunks = list(stream(Decoder(target), PROMPT, 8, pace=pace))
    assert all(chunk.drafted == 0 and len(chunk.tokens) == 1 for chunk in chunks)
    assert pace.accepted_length == 1
    assert pace.acceptance == []


def test_acceptance_counts_what_was_reached():
    pace = Pace()
    for drafted, tokens, verified in ((2, 3, 3), (0, 1, 3), (1, 1, 3), (3, 4, 3)):
        pace.add(Chunk(list(range(tokens)), drafted, verified, ""), 0.1)
    # the third answer ended with an accepted token: what stood behind it was never looked at
    assert pace.reached == [4, 2, 2]
    assert pace.accepted == [3, 2, 1]


def test_a_prompt_beyond_the_context_is_refused(pair):
    target, draft = pair
    with pytest.raises(UserError, match="context"):
        next(stream(Decoder(target, draft), [1] * 300, 8))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(min_size=1, max_size=40).filter(lambda text: "\N{REPLACEMENT CHARACTER}" not in text))
@settings(max_examples=60)
def test_text_comes_out_whole(kind, text):
    tokenizer = make_tokenizer(None, kind)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    writer = Detokenizer(tokenizer)
    assert "".join(writer.add(token) for token in ids) == tokenizer.decode(ids, skip_special_tokens=True)
