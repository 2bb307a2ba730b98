import pytest

from specjax.text import Tokenizer

P = "tokenizer.ggml."


@pytest.fixture(scope="module")
def named(golden):
    return golden("named.json")


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "llama-bpe"])
def test_named_pre_tokenizers_give_the_ids_of_transformers(named, name):
    tokenizer = Tokenizer.from_gguf(named["fields"] | {P + "pre": name})
    for text, ids in zip(named["strings"], named["ids"][name], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_the_named_pre_tokenizers_are_told_apart(named):
    assert len({str(rows) for rows in named["ids"].values()}) == 3


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("default", "gpt-2"),
        ("phi-2", "gpt-2"),
        ("llama3", "llama-bpe"),
        ("llama-v3", "llama-bpe"),
        ("starcoder", "smollm"),
    ],
)
def test_names_for_one_thing(named, name, same):
    one = Tokenizer.from_gguf(named["fields"] | {P + "pre": name})
    assert one == Tokenizer.from_gguf(named["fields"] | {P + "pre": same})


def test_ids_are_those_of_sentencepiece(sentencepiece, golden):
    for text, ids, back in golden("sentencepiece.json")["cases"]:
        if "<tool_call>" in text:
            # The library puts its space in front of a user-defined token, and
            # tokenizer.json files put it after.
            continue
        assert sentencepiece.encode(text, add_special_tokens=False) == ids, text
        assert sentencepiece.encode(text) == [1, *ids], text
        assert sentencepiece.decode(ids) == back, text


def test_sentencepiece_special_tokens_in_text(sentencepiece):
    end = sentencepiece.token_to_id("<|im_end|>")
    call = sentencepiece.token_to_id("<tool_call>")
    ids = sentencepiece.encode("a<|im_end|>b<tool_call>")
    assert ids[0] == sentencepiece.bos_id
    assert end in ids
    assert ids[-1] == call
    assert end in sentencepiece.special_ids
    assert call not in sentencepiece.special_ids


def test_sentencepiece_without_a_leading_space(golden):
    fields = golden("sentencepiece.json")["fields"]
    tokenizer = Tokenizer.from_gguf(
        fields | {P + "add_space_prefix": False, P + "add_bos_token": False}
    )
    ids = tokenizer.encode(" the")
    assert tokenizer.id_to_token(ids[0]) == "▁the"
    assert tokenizer.decode(ids) == " the"
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_added_bos_and_eos(named):
    fields = named["fields"] | {P + "pre": "gpt-2"}
    end = fields[P + "eos_token_id"]
    more = {P + "add_bos_token": True, P + "bos_token_id": 5, P + "add_eos_token": True}
    tokenizer = Tokenizer.from_gguf(fields | more)
    bare = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [5, *bare, end]
    assert tokenizer.encode("") == [5, end]


def test_added_bos_by_default(named):
    fields = {k: v for k, v in named["fields"].items() if k != P + "add_bos_token"}
    bos = {P + "bos_token_id": 7}
    llama = Tokenizer.from_gguf(fields | bos | {P + "pre": "llama-bpe"})
    assert llama.encode("hi")[0] == 7
    gpt2 = Tokenizer.from_gguf(fields | bos | {P + "pre": "gpt-2"})
    assert gpt2.encode("hi")[0] != 7
    with pytest.raises(ValueError, match="no tokenizer.ggml.bos_token_id"):
        Tokenizer.from_gguf(fields | {P + "pre": "llama-bpe"})


def test_bos_token_with_template_characters(named):
    tokens = [*named["fields"][P + "tokens"], "$A:1 x"]
    fields = named["fields"] | {
        P + "pre": "gpt-2",
        P + "tokens": tokens,
        P + "token_type": [*named["fields"][P + "token_type"], 3],
        P + "bos_token_id": len(tokens) - 1,
        P + "add_bos_token": True,
    }
    assert Tokenizer.from_gguf(fields).encode("")[0] == len(tokens) - 1


def test_end_of_turn_ends_a_text_too(named):
    fields = named["fields"] | {P + "pre": "gpt-2", P + "eot_token_id": 3}
    end = fields[P + "eos_token_id"]
    assert Tokenizer.from_gguf(fields).eos_ids == (end, 3)
    fields[P + "eot_token_id"] = end
    assert Tokenizer.from_gguf(fields).eos_ids == (end,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "model is 'bert'; supported are"),
        ({"model": None}, "has no tokenizer.ggml.model"),
        ({"pre": "klingon"}, "'klingon'; known pre-tokenizers are .*'smollm'"),
        ({"pre": None}, "has no tokenizer.ggml.pre"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokens must be a list, got str"),
        ({"tokens": ["a", "b", "a"]}, "holds 'a' twice, as 0 and 2"),
        ({"tokens": ["a", 3]}, r"tokens\[1\] is 3, not a string"),
        ({"token_type": [1, 1]}, "has 2 entries for"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab'"),
        ({"merges": ["a b c"]}, r"merges\[0\] is 'a b c'"),
        ({"merges": ["a ☃"]}, "'☃' is not a token"),
        ({"merges": [3]}, r"merges\[0\] is 3"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000, but the file has"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": True}, "must be a int, got bool"),
        ({"add_bos_token": 1}, "must be a bool, got int"),
        ({"add_space_prefix": True}, "add_space_prefix is true"),
    ],
)
def test_bad_byte_level_fields(named, change, message):
    fields = named["fields"] | {P + "pre": "gpt-2"}
    fields |= {P + name: value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "has no tokenizer.ggml.scores"),
        ({"scores": [1.0]}, "scores has 1 entries for"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is set"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is set"),
        ({"bos_token_id": None}, "adds a BOS token .* no tokenizer.ggml.bos_token_id"),
    ],
)
def test_bad_sentencepiece_fields(golden, change, message):
    fields = golden("sentencepiece.json")["fields"]
    fields |= {P + name: value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(fields)


def test_bad_types_and_template(named):
    fields = named["fields"] | {P + "pre": "gpt-2"}
    types = [9, *fields[P + "token_type"][1:]]
    with pytest.raises(ValueError, match="token_type holds 9; known are"):
        Tokenizer.from_gguf(fields | {P + "token_type": types})
    with pytest.raises(ValueError, match="chat_template must be a string"):
        Tokenizer.from_gguf(fields | {"tokenizer.chat_template": 3})
