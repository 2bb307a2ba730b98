import functools
import random

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models

from specjax.text import (
    IncrementalDetokenizer,
    StopStringMatcher,
    TextStream,
    Tokenizer,
)
from specjax.text._directory import Roles

NAMES = ("smollm2", "bytelevel", "metaspace", "sentencepiece")
quick = hypothesis.settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=NAMES)
def tokenizer(request):
    return request.getfixturevalue(request.param)


@functools.cache
def bytes_first(tokenizer):
    """Ids, those that are single bytes or special as likely as all the others."""
    size = tokenizer.vocab_size
    short = [
        i
        for i in range(size)
        if len(token := tokenizer.id_to_token(i)) == 1
        or token.startswith("<0x")
        or token.startswith("▁")
    ]
    special = sorted(tokenizer.special_ids)
    return st.one_of(
        st.integers(0, size - 1), st.sampled_from(short), st.sampled_from(special)
    )


def cut(draw, ids):
    """The ids in pieces, some of them empty."""
    n = draw(st.integers(0, 6))
    at = sorted(draw(st.lists(st.integers(0, len(ids)), min_size=n, max_size=n)))
    return [ids[i:j] for i, j in zip([0, *at], [*at, len(ids)], strict=True)]


def one_by_one(tokenizer, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [detokenizer.push([i]) for i in ids] + [detokenizer.flush()]


class TestIncrementalDetokenizer:
    @quick
    @hypothesis.given(data=st.data(), skip=st.booleans())
    def test_pieces_make_the_decoded_text(self, tokenizer, data, skip):
        ids = data.draw(st.lists(bytes_first(tokenizer), max_size=30))
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        pieces = [detokenizer.push(part) for part in cut(data.draw, ids)]
        pieces.append(detokenizer.flush())
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)

    @quick
    @hypothesis.given(text=st.text(max_size=40))
    def test_real_text_never_shows_half_a_character(self, tokenizer, text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        shown = ""
        for piece in one_by_one(tokenizer, ids):
            shown += piece
            assert whole.startswith(shown)
        assert shown == whole

    def test_golden_strings(self, tokenizer, golden):
        for text, *_ in golden("smollm2.json")["cases"]:
            ids = tokenizer.encode(text)
            for skip in (True, False):
                pieces = one_by_one(tokenizer, ids, skip_special_tokens=skip)
                whole = tokenizer.decode(ids, skip_special_tokens=skip)
                assert "".join(pieces) == whole

    def test_a_character_comes_with_its_last_byte(self, bytelevel):
        ids = [bytelevel.token_to_id(c) for c in "ðŁĺĢ"]
        assert bytelevel.decode(ids) == "😀"
        assert one_by_one(bytelevel, ids) == ["", "", "", "😀", ""]

    def test_bytes_that_cannot_become_a_character(self, bytelevel):
        lead, letter = bytelevel.token_to_id("ð"), bytelevel.token_to_id("a")
        assert one_by_one(bytelevel, [lead, letter]) == ["", "\ufffda", ""]
        assert one_by_one(bytelevel, [lead, lead]) == ["", "\ufffd", "\ufffd"]

    def test_byte_fallback_waits_for_the_end_of_the_run(self, sentencepiece):
        ids = [sentencepiece.token_to_id(f"<0x{b:02X}>") for b in "é中".encode()]
        word = sentencepiece.token_to_id("▁the")
        pieces = one_by_one(sentencepiece, [*ids, word])
        assert pieces == ["", "", "", "", "", "é中 the", ""]
        spoiled = one_by_one(sentencepiece, [*ids, ids[0]])
        assert spoiled[-1] == "\ufffd" * 6

    def test_only_the_first_space_of_a_text_is_dropped(self, sentencepiece):
        word, space = (sentencepiece.token_to_id(t) for t in ("▁the", "▁"))
        assert one_by_one(sentencepiece, [word, word]) == ["the", " the", ""]
        pieces = one_by_one(sentencepiece, [space, space, word])
        assert pieces == ["", " ", " the", ""]

    def test_the_cost_does_not_grow(self, sentencepiece, monkeypatch):
        lengths = []
        decode = Tokenizer.decode

        def spy(self, ids, **options):
            lengths.append(len(ids))
            return decode(self, ids, **options)

        monkeypatch.setattr(Tokenizer, "decode", spy)
        ids = sentencepiece.encode("the same words again and again " * 20)
        one_by_one(sentencepiece, ids)
        assert max(lengths) <= 5

    def test_misuse(self, smollm2):
        detokenizer = IncrementalDetokenizer(smollm2)
        with pytest.raises(ValueError, match="99999 has no token"):
            detokenizer.push([99999])
        assert detokenizer.flush() == ""
        assert detokenizer.flush() == ""
        with pytest.raises(ValueError, match="push after flush"):
            detokenizer.push([])

    @pytest.mark.parametrize(
        "decoder",
        [
            None,
            decoders.Metaspace(),
            decoders.WordPiece(),
            decoders.BPEDecoder(suffix="</w>"),
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
            decoders.Sequence([decoders.ByteLevel()]),
        ],
    )
    @quick
    @hypothesis.given(data=st.data())
    def test_other_decoders(self, decoder, data):
        words = ["a", "▁b", "▁", "▁▁", "##c", "d</w>", "'s", ".", "<0xE4>", "é", "Ġe"]
        vocab = {word: i for i, word in enumerate(words)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        if decoder is not None:
            backend.decoder = decoder
        tokenizer = Tokenizer(backend, Roles())
        ids = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=12))
        assert "".join(one_by_one(tokenizer, ids)) == tokenizer.decode(ids)

    @pytest.mark.parametrize(
        "steps",
        [
            [decoders.Fuse(), decoders.Replace("ab", "x")],
            [decoders.Fuse(), decoders.Strip(" ", 0, 1)],
            [decoders.Metaspace(), decoders.CTC()],
        ],
    )
    def test_decoders_that_cannot_stream(self, steps):
        backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
        backend.decoder = decoders.Sequence(steps)
        with pytest.raises(ValueError, match="collect the ids"):
            IncrementalDetokenizer(Tokenizer(backend, Roles()))


class TestStopStringMatcher:
    def run(self, stop, *pieces):
        matcher = StopStringMatcher(stop)
        shown = []
        for piece in pieces:
            if matcher.finished:
                break
            shown.append(matcher.push(piece))
        shown.append(matcher.flush())
        assert matcher.n_chars == len("".join(shown))
        return shown, matcher.match

    def test_no_stop_strings(self):
        assert self.run([], "ab", "c") == (["ab", "c", ""], None)

    def test_spanning_pieces(self):
        assert self.run(["STOP"], "a S", "TO", "P b") == (["a ", "", "", ""], "STOP")

    def test_false_alarm(self):
        assert self.run(["STOP"], "a S", "To", "y") == (["a ", "STo", "y", ""], None)

    def test_held_back_at_the_end(self):
        assert self.run(["\n\nUser"], "ok\n\nUs") == (["ok", "\n\nUs"], None)

    def test_earliest_start_wins(self):
        assert self.run(["b", "abc"], "xab", "c") == (["x", "", ""], "abc")
        assert self.run(["b", "abc"], "xab", "d") == (["x", "a", ""], "b")
        assert self.run(["b", "abc"], "xab") == (["x", "a"], "b")

    def test_longest_wins_a_tie(self):
        assert self.run(["ab", "abc", "a"], "xabc") == (["x", ""], "abc")

    def test_overlapping_with_itself(self):
        assert self.run(["aab"], "aa", "a", "ab") == (["", "a", "a", ""], "aab")

    def test_push_after_the_end(self):
        matcher = StopStringMatcher(["."])
        matcher.push("a.b")
        assert matcher.finished
        with pytest.raises(ValueError, match="new matcher"):
            matcher.push("c")

    def test_bad_stop_strings(self):
        with pytest.raises(ValueError, match="is empty"):
            StopStringMatcher(["a", ""])
        with pytest.raises(TypeError, match=r"use \['ab'\]"):
            StopStringMatcher("ab")
        with pytest.raises(TypeError, match="must be a str, got int"):
            StopStringMatcher([3])
        with pytest.raises(ValueError, match="lone surrogate"):
            StopStringMatcher(["\ud800"])

    @quick
    @hypothesis.given(
        text=st.text("abc", max_size=12),
        stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    )
    def test_against_the_definition(self, text, stop):
        shown, match = self.run(stop, *text)
        starts = [(text.find(s), -len(s), s) for s in stop if s in text]
        if starts:
            at, _, _ = min(starts)
            assert "".join(shown) == text[:at]
            assert text.startswith(match, at)
        else:
            assert ("".join(shown), match) == (text, None)


def check_kept(tokenizer, ids, n_tokens, kept, skip):
    """Checks `n_tokens` by decoding the first ids alone."""

    def decoded(n):
        return tokenizer.decode(ids[:n], skip_special_tokens=skip)

    if not kept:
        assert n_tokens == 0
        return
    around = ids[max(0, n_tokens - 1) : n_tokens + 1]
    if any(tokenizer.id_to_token(i).startswith("<0x") for i in around):
        # Half a run of byte tokens does not decode to half of its text.
        return
    # The last id may hold a part of the last character only.
    assert decoded(n_tokens).removesuffix("\ufffd").startswith(kept[:-1])
    assert len(decoded(n_tokens)) >= len(kept)
    last = ids[n_tokens - 1]
    assert not (skip and last in tokenizer.special_ids)
    if kept.endswith("\ufffd"):
        # Several tokens may share one character that stays broken.
        return
    fewer = decoded(n_tokens - 1)
    assert len(fewer) < len(kept) or not fewer.startswith(kept)


class TestTextStream:
    def encode(self, tokenizer, text):
        return tokenizer.encode(text, add_special_tokens=False)

    def test_without_stop_strings(self, tokenizer):
        ids = self.encode(tokenizer, "Some text, é 中 😀.")
        stream = TextStream(tokenizer)
        pieces = [stream.push([i]) for i in ids] + [stream.flush()]
        assert "".join(pieces) == stream.text == tokenizer.decode(ids)
        assert stream.n_tokens == len(ids)
        assert not stream.finished
        assert stream.stop is None

    def test_inside_a_block(self, tokenizer):
        ids = self.encode(tokenizer, "one two STOP three four")
        stream = TextStream(tokenizer, ["STOP"])
        shown = stream.push(ids)
        assert stream.finished
        assert stream.stop == "STOP"
        assert shown == stream.text == "one two "
        assert stream.flush() == ""
        assert stream.n_tokens < len(ids)
        assert tokenizer.decode(ids[: stream.n_tokens]).startswith("one two")
        assert not tokenizer.decode(ids[: stream.n_tokens - 1]).startswith("one two ")

    def test_at_the_very_start(self, smollm2):
        stream = TextStream(smollm2, ["Hello"])
        assert stream.push(self.encode(smollm2, "Hello")) == ""
        assert (stream.text, stream.n_tokens, stream.finished) == ("", 0, True)

    def test_stop_inside_a_token(self, smollm2):
        ids = self.encode(smollm2, "Good morning")
        assert len(ids) == 2
        stream = TextStream(smollm2, ["rning"])
        stream.push(ids)
        assert stream.text == "Good mo"
        assert stream.n_tokens == 2

    def test_stop_after_a_broken_character(self, bytelevel):
        lead, letter = bytelevel.token_to_id("ð"), bytelevel.token_to_id("a")
        stream = TextStream(bytelevel, ["a"])
        stream.push([lead, letter])
        assert (stream.text, stream.n_tokens) == ("\ufffd", 1)

    def test_special_tokens_are_counted_but_not_shown(self, smollm2):
        ids = self.encode(smollm2, "<|im_start|>Hi<|im_end|>.")
        stream = TextStream(smollm2, ["."])
        stream.push(ids)
        assert stream.text == "Hi"
        assert stream.n_tokens == ids.index(2)
        stream = TextStream(smollm2, ["<|im_end|>"], skip_special_tokens=False)
        stream.push(ids)
        assert stream.text == "<|im_start|>Hi"
        assert stream.n_tokens == ids.index(2)

    def test_stop_string_that_flush_completes(self, sentencepiece):
        ids = [sentencepiece.token_to_id(f"<0x{b:02X}>") for b in "中é".encode()]
        stream = TextStream(sentencepiece, ["é"])
        assert stream.push(ids) == ""
        assert stream.flush() == "中"
        assert (stream.finished, stream.n_tokens) == (True, 3)

    def test_stop_inside_a_run_of_bytes(self, sentencepiece):
        def byte(value):
            return sentencepiece.token_to_id(f"<0x{value:02X}>")

        word = sentencepiece.token_to_id("▁the")
        ids = [word, *map(byte, "é中".encode()), word]
        stream = TextStream(sentencepiece, ["中"])
        stream.push(ids)
        assert (stream.text, stream.n_tokens) == ("theé", 3)
        ids = [word, byte(0xE4), byte(0xFF), byte(0x61), word]
        stream = TextStream(sentencepiece, ["\ufffd the"])
        stream.push(ids)
        assert (stream.text, stream.n_tokens) == ("the\ufffd\ufffd", 3)

    @quick
    @hypothesis.given(data=st.data(), skip=st.booleans())
    def test_the_cut_does_not_matter(self, tokenizer, data, skip):
        ids = data.draw(st.lists(bytes_first(tokenizer), max_size=20))
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, min(len(whole), start + 3)))
        stop = [s for s in (whole[start:end], "a", "zq") if s]
        stream = TextStream(tokenizer, stop, skip_special_tokens=skip)
        shown = ""
        for part in cut(data.draw, ids):
            if not stream.finished:
                shown += stream.push(part)
                assert shown == stream.text
        shown += stream.flush()
        found = [whole.find(s) for s in stop if s in whole]
        kept = whole[: min(found)] if found else whole
        assert shown == stream.text == kept
        assert stream.finished == bool(found)
        if found:
            check_kept(tokenizer, ids, stream.n_tokens, kept, skip)

    def test_pieces_are_not_longer_held_than_needed(self, smollm2):
        ids = self.encode(smollm2, "a b c d e f g")
        stream = TextStream(smollm2, ["xyz"])
        assert [stream.push([i]) for i in ids] == [smollm2.decode([i]) for i in ids]

    def test_misuse(self, smollm2):
        stream = TextStream(smollm2, ["b"])
        with pytest.raises(ValueError, match="has no token"):
            stream.push([10**6])
        assert stream.n_tokens == 0
        stream.push(self.encode(smollm2, "a b"))
        with pytest.raises(ValueError, match="check `finished`"):
            stream.push([20])
        stream = TextStream(smollm2)
        stream.flush()
        with pytest.raises(ValueError, match="new stream"):
            stream.push([20])
        with pytest.raises(ValueError, match="is empty"):
            TextStream(smollm2, [""])


def test_long_random_ids(tokenizer):
    rng = random.Random(0)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(2000)]
    for skip in (True, False):
        pieces = one_by_one(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
