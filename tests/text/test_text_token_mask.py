import itertools
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from specjax.testing import tiny_tokenizer
from specjax.text import Tokenizer, TokenMask
from specjax.text._directory import Roles

# Bytes as GPT-2's vocabulary spells them: E2 82 AC is the euro sign, C3 A9 an e with
# an acute accent.
EURO, ACUTE = "âĤ¬", "Ã©"


def _bytelevel(tokens, special=(), added=(), eos=()):
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    return Tokenizer(backend, Roles(eos_ids=tuple(eos)))


def _members(pattern, alphabet, longest):
    """Every text over an alphabet that the pattern matches, by Python's engine."""
    compiled = re.compile(pattern)
    texts = (
        "".join(chars)
        for n in range(longest + 1)
        for chars in itertools.product(alphabet, repeat=n)
    )
    return {text.encode() for text in texts if compiled.fullmatch(text)}


def _check_exhaustively(mask, members, spelled, ends, depth):
    """Compares every sequence of some ids with the definition."""
    prefixes = {text[:n] for text in members for n in range(len(text) + 1)}
    n_allowed = 0
    for n in range(depth + 1):
        for ids in itertools.product([*spelled, *ends], repeat=n):
            cut = next((i for i, t in enumerate(ids) if t in ends), n)
            text = b"".join(spelled[t] for t in ids[:cut])
            if cut < n:
                expected = text in members and all(t in ends for t in ids[cut:])
            else:
                expected = text in prefixes
            assert mask.allows(ids) == expected, (ids, text)
            n_allowed += expected
    return n_allowed


PATTERNS = [
    ("a|ab", "ab"),
    ("a(?:bc)?", "abc"),
    ("(?:a|b)*c", "abc"),
    ("a{2,3}", "ab"),
    ("(a{1,2}){2}b*", "ab"),
    ("[^a]b?", "abc"),
    ("a*?b", "ab"),
    ("^ab$|^c", "abc"),
    ("(?:ab|a)(?:c|bc)", "abc"),
    ("(?:a*)*b|(?:)", "ab"),
    (".b", "ab\n"),
    ("(?s:.)b", "ab\n"),
    ("(?i)aB", "aAbB"),
    (r"\d\D", "1a"),
    (r"[\w-]+\s", "a- "),
    (r"[^\W_]b|_", "a_b"),
    ("", "ab"),
    ("(?:){1000}a{0}(?:a?b?){1,2}", "ab"),
]


@pytest.mark.parametrize(("pattern", "alphabet"), PATTERNS)
def test_a_sequence_is_allowed_iff_it_can_become_a_match(pattern, alphabet):
    tokenizer = tiny_tokenizer(100)
    ends = [98, 99]
    mask = TokenMask.from_regex(pattern, tokenizer, ends)
    spelled = {tokenizer.encode(char)[0]: char.encode() for char in alphabet}
    # Members have at most three more characters than what was said so far.
    members = _members(pattern, alphabet, 7)
    assert members
    assert _check_exhaustively(mask, members, spelled, ends, 4) > 1


@pytest.mark.parametrize(
    "pattern",
    ["é|€a", "[é€]{1,2}", ".a?", "(?i)É", r"\w{1,3}", "[^é]", "[\x80-\uffff]a"],
)
def test_characters_split_over_tokens(pattern):
    tokens = ["a", "Ã", "©", "â", "Ĥ", "¬", ACUTE, EURO, "aÃ", "©a", "Ĥ¬", "¬aâ", "<e>"]
    tokenizer = _bytelevel(tokens)
    texts = [
        *(
            b"a",
            b"\xc3",
            b"\xa9",
            b"\xe2",
            b"\x82",
            b"\xac",
            "é".encode(),
            "€".encode(),
        ),
        *(b"a\xc3", b"\xa9a", b"\x82\xac", b"\xaca\xe2"),
    ]
    mask = TokenMask.from_regex(pattern, tokenizer, [12])
    # All characters that the bytes above can make.
    tails = [b"\xa9", b"\x82", b"\xac"]
    made = [b"a", *(b"\xc3" + t for t in tails)]
    made += [b"\xe2" + t + u for t in tails for u in tails]
    members = _members(pattern, [text.decode() for text in made], 4)
    spelled = dict(enumerate(texts))
    assert _check_exhaustively(mask, members, spelled, [12], 3) > 3


def test_all_spellings_of_a_text_are_allowed():
    # The added token is plain text and the other is spelled in stand-ins.
    tokenizer = _bytelevel(["aĠb", "a", "Ġb", "<e>"], added=["a b"])
    mask = TokenMask.from_regex("a b", tokenizer, [3])
    assert [tokenizer.decode([i]) for i in (0, 4)] == ["a b", "a b"]
    for ids in ([0], [4], [1, 2]):
        assert mask.allowed(mask.advance(ids)).nonzero()[0].tolist() == [3]


def test_end_ids_never_stand_for_their_text():
    tokenizer = tiny_tokenizer(100)
    a, b = tokenizer.encode("ab")
    mask = TokenMask.from_regex("ab?|ba", tokenizer, [b])
    # "ab" and "ba" cannot be spelled, so only "a" is left.
    assert mask.allows([a, b, b])
    assert not mask.allows([b])
    assert mask.allowed(mask.advance([a])).nonzero()[0].tolist() == [b]
    assert mask.n_states == 3


def test_special_tokens_and_padding_are_never_allowed():
    tokenizer = _bytelevel(["a", "<", ">", "s"], special=["<s>"], added=["<t>"])
    assert tokenizer.vocab_size == 6
    mask = TokenMask.from_regex("(?s:.)*", tokenizer, [7], vocab_size=9)
    assert mask.vocab_size == 9
    allowed = mask.allowed(mask.start)
    assert allowed.tolist() == [True] * 4 + [False, True, False, True, False]
    # An added token is the text that it is; a special one is not.
    tokenizer = _bytelevel(["a"], special=["<s>"], added=["<t>"])
    mask = TokenMask.from_regex("<t>|<s>", tokenizer, [1])
    assert mask.allowed(mask.start).tolist() == [False, False, True]


def test_states_from_which_no_tokens_lead_on_are_cut_off():
    # There is no "c": after "b" nothing could follow.
    tokenizer = _bytelevel(["a", "b", "ab", "<e>"])
    mask = TokenMask.from_regex("a|abc|bc", tokenizer, [3])
    assert mask.allowed(mask.start).tolist() == [True, False, False, False]
    assert mask.transitions.tolist() == [
        [1, -1, -1, -1],
        [-1, -1, -1, 2],
        [-1] * 3 + [2],
    ]


def test_without_end_ids_a_text_must_be_able_to_go_on():
    tokenizer = tiny_tokenizer(100)
    mask = TokenMask.from_regex("(?:ab)+", tokenizer, [])
    assert mask.n_states == 2 + 1
    assert (mask.transitions >= 0).sum() == mask.n_states
    for pattern in ("ab", "a|b+", ""):
        with pytest.raises(ValueError, match=r"eos_ids is empty.*tokenizer.eos_ids"):
            TokenMask.from_regex(pattern, tokenizer, [])


def _sentencepiece(tokens, prefix=True):
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    kind = [6 if t.startswith("<0x") else kinds.get(t, 1) for t in tokens]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kind,
        "scores": [0.0] * len(tokens),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": prefix,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in values.items()})


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("pattern", ["a é", " ?aa?", "é|éa", "[^b]{1,2}", "<unk>|a"])
def test_byte_fallback_and_the_space_in_front(prefix, pattern):
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "a▁", "é"]
    tokens += ["<0x20>", "<0xC3>", "<0xA9>"]
    tokenizer = _sentencepiece(tokens, prefix)
    mask = TokenMask.from_regex(pattern, tokenizer, [2])
    texts = [b" ", b"a", b" a", b"a ", "é".encode(), b" ", b"\xc3", b"\xa9"]
    members = {m for m in _members(pattern, "a é", 5) if m != b"<unk>"}
    prefixes = {text[:n] for text in members for n in range(len(text) + 1)}
    n_ends = 0
    for n in range(4):
        for ids in itertools.product(range(3, 11), repeat=n):
            text = b"".join(texts[i - 3] for i in ids)
            # The decoder takes away the space that the encoder puts in front.
            text = text.removeprefix(b" ") if prefix else text
            assert mask.allows(ids) == (text in prefixes), (ids, text)
            assert mask.allows([*ids, 2]) == (text in members), (ids, text)
            if text in members:
                assert tokenizer.decode(ids) == text.decode()
                n_ends += 1
            assert not mask.allows([*ids, 0]) and not mask.allows([*ids, 1])
    assert n_ends


def test_from_allowed():
    mask = TokenMask.from_allowed([3, np.int64(1), 3], 5)
    assert (mask.n_states, mask.vocab_size, mask.start) == (1, 5, 0)
    assert mask.allowed(0).tolist() == [False, True, False, True, False]
    assert mask.allows([1, 3, 3, 1]) and not mask.allows([1, 2])
    assert mask.name == "2 allowed ids"
    assert not TokenMask.from_allowed([4], 5).allows([-1])
    with pytest.raises(ValueError, match="no ids: at least one"):
        TokenMask.from_allowed([], 5)
    for ident in (5, -1):
        with pytest.raises(ValueError, match=f"id {ident}, but the ids are 0 to 4"):
            TokenMask.from_allowed([ident], 5)
    with pytest.raises(TypeError):
        TokenMask.from_allowed([1.5], 5)


def test_advance_says_where_it_stops():
    tokenizer = tiny_tokenizer(100)
    mask = TokenMask.from_regex("abc", tokenizer, [99])
    a, b, c = tokenizer.encode("abc")
    middle = mask.advance([a, b])
    assert mask.advance([c], middle) == mask.advance([a, b, c])
    assert mask.advance([]) == mask.start
    with pytest.raises(ValueError, match=f"regex abc: the id {c} at position 1 is not"):
        mask.advance([a, c])
    for ident in (-1, 100):
        with pytest.raises(ValueError, match=f"the id {ident} at position 0"):
            mask.advance([ident])
        assert not mask.allows([ident])
    with pytest.raises(ValueError, match="the state 9 is out of range"):
        mask.advance([a], 9)
    with pytest.raises(ValueError, match="the state -1 is out of range"):
        mask.allowed(-1)


def _table(*rows):
    return np.array(rows, np.int32)


@pytest.mark.parametrize(
    ("transitions", "start", "error", "message"),
    [
        ([[0]], 0, TypeError, "int32, got list"),
        (np.zeros((1, 1)), 0, TypeError, "int32, got float64"),
        (_table([0])[0], 0, ValueError, r"\[n_states, vocab_size\], got shape \(1,\)"),
        (np.zeros((0, 3), np.int32), 0, ValueError, r"got shape \(0, 3\)"),
        (_table([1]), 0, ValueError, "hold 1, but the states are 0 to 0"),
        (_table([-2, 0]), 0, ValueError, "hold -2, but the states are 0 to 0"),
        (_table([0]), 1, ValueError, "start is 1, but the states are 0 to 0"),
        (_table([0]), -1, ValueError, "start is -1"),
        (_table([0]), 0.0, TypeError, "float"),
        (_table([1, 0], [-1, -1]), 0, ValueError, "state 1 can be reached.*an end id"),
    ],
)
def test_tables_are_checked(transitions, start, error, message):
    with pytest.raises(error, match=message):
        TokenMask(transitions, start, "mine")


def test_a_table_is_read_only_and_compared_by_identity():
    table = _table([0, -1], [-1, -1])
    # State 1 allows nothing, but nothing leads to it.
    mask = TokenMask(table, 0)
    with pytest.raises(ValueError, match="read-only"):
        mask.transitions[0, 0] = 1
    assert table.flags.writeable
    assert mask != TokenMask(table, 0) and len({mask, mask}) == 1
    assert repr(mask) == "TokenMask('token mask', n_states=2, vocab_size=2)"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", r"'\(a' is not a regular expression: missing \).*re.compile must"),
        ("a{3,2}", "min repeat greater than max repeat"),
        ("a{99999999999999999999}", "cannot be read.*use smaller counts"),
        ("a(?=b)", "a lookahead or lookbehind.*spell out"),
        ("(?<!a)b", "a negative lookahead or lookbehind"),
        (r"(a)\1", "a back-reference"),
        (r"(a)?(?(1)b|c)", "a conditional group"),
        ("(?>a|ab)c", r"an atomic group.*plain group"),
        ("a*+b", "a possessive quantifier.*plain quantifier"),
        (r"\ba", r"\\b or \\B.*spell out"),
        ("a^b", "an anchor.*leave it out"),
        ("(?:a$)*", "an anchor"),
        (r"[^\s\S]", "matches no text at all: loosen"),
        ("a\ud800", "lone surrogate"),
        ("(?:" * 2000 + "a" + ")" * 2000, "cannot be read.*fewer nested groups"),
        ("a{50000}b{60000}", "more than 100000 parts.*lower them"),
        ("(?:a|b)*a(?:a|b){30}", "more than 8192 states over bytes.*raise max_states"),
        ("é", r"no sequence of the tokenizer's tokens spells.*loosen it"),
        ("a{40}", "table of 42 states .*more than max_states=41.*raise max_states"),
    ],
)
def test_patterns_that_cannot_be_followed_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        TokenMask.from_regex(pattern, tiny_tokenizer(100), [99], max_states=41)


def test_a_table_may_have_max_states():
    mask = TokenMask.from_regex("a{40}", tiny_tokenizer(100), [99], max_states=42)
    assert mask.n_states == 42


def test_arguments_are_checked():
    tokenizer = tiny_tokenizer(100)
    for ends in ([100], [-1]):
        with pytest.raises(ValueError, match=f"eos_ids holds {ends[0]}.*0 to 99"):
            TokenMask.from_regex("a", tokenizer, ends)
    with pytest.raises(TypeError):
        TokenMask.from_regex("a", tokenizer, ["</s>"])
    with pytest.raises(ValueError, match="vocab_size is 99.*padding included"):
        TokenMask.from_regex("a", tokenizer, [1], vocab_size=99)
    with pytest.raises(ValueError, match="max_states=0 must be"):
        TokenMask.from_regex("a", tokenizer, [1], max_states=0)
    with pytest.raises(TypeError, match="must be a str"):
        TokenMask.from_regex(b"a", tokenizer, [1])


def test_decoders_that_look_at_neighbours_are_refused():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a</w>": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(ValueError, match="BPEDecoder.*TokenMask.from_allowed"):
        TokenMask.from_regex("a", Tokenizer(backend, Roles()), [1])
