import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from specjax.text import ChatTemplate, Tokenizer

# Control characters that SmolLM2's vocabulary has no byte for.
LOST = "\x04\x06\x13\x14\x16\x1d"
NAMES = ("smollm2", "bytelevel", "metaspace")


@pytest.fixture(params=NAMES)
def pair(request, golden):
    name = request.param
    return request.getfixturevalue(name), golden(f"{name}.json")


def test_golden_files_hold_many_distinct_strings(golden):
    for name in NAMES:
        strings = [case[0] for case in golden(f"{name}.json")["cases"]]
        assert len(set(strings)) == len(strings) >= 200


def test_ids_are_those_of_transformers(pair):
    tokenizer, golden = pair
    for text, bare, full, _ in golden["cases"]:
        assert tokenizer.encode(text, add_special_tokens=False) == bare, text
        assert tokenizer.encode(text) == full, text


def test_decoded_text_is_that_of_transformers(pair):
    tokenizer, golden = pair
    for text, _, full, back in golden["cases"]:
        assert tokenizer.decode(full, skip_special_tokens=True) == back, text


def test_chats_are_those_of_transformers(pair):
    tokenizer, golden = pair
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert golden["chats"]
    for messages, text, prompt in golden["chats"]:
        assert template.render(messages, add_generation_prompt=prompt) == text


def test_smollm2_text_comes_back(smollm2, golden):
    for text, *_ in golden("smollm2.json")["cases"]:
        # The vocabulary has no token for these bytes and drops them.
        known = "".join(char for char in text if char not in LOST)
        assert smollm2.decode(smollm2.encode(text)) == known


def test_smollm2_roles(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == (2,)
    assert smollm2.pad_id == 2
    assert smollm2.bos_token == "<|im_start|>"
    assert smollm2.eos_token == smollm2.pad_token == "<|im_end|>"
    assert smollm2.special_ids == frozenset(range(17))
    assert "SmolLM" in smollm2.chat_template
    assert smollm2.id_to_token(28120) is not None
    assert smollm2.token_to_id(smollm2.id_to_token(28120)) == 28120
    assert smollm2.id_to_token(49152) is None
    assert smollm2.id_to_token(-1) is None
    assert smollm2.id_to_token(2**40) is None
    assert smollm2.token_to_id("no such token at all") is None


def test_smollm2_digits_are_split_from_white_space(smollm2):
    tokens = [smollm2.id_to_token(i) for i in smollm2.encode("x   12")]
    assert tokens == ["x", "ĠĠĠ", "1", "2"]


def test_directory_roles(bytelevel, metaspace):
    bos, end = bytelevel.bos_id, bytelevel.token_to_id("<|im_end|>")
    assert bytelevel.id_to_token(bos) == "<|endoftext|>"
    assert bytelevel.eos_ids == (end, bos)
    assert bytelevel.eos_token == "<|im_end|>"
    assert bytelevel.pad_id == bos
    assert bytelevel.token_to_id("<tool_call>") not in bytelevel.special_ids
    assert metaspace.bos_id == 1
    assert metaspace.eos_ids == (2,)
    assert metaspace.pad_id == 2


def test_truncation_in_the_file_is_not_applied(bytelevel):
    assert len(bytelevel.encode("one two three four five six seven " * 10)) > 8


@pytest.mark.parametrize("name", [*NAMES, "sentencepiece"])
def test_saved_tokenizer_is_equal(name, request, tmp_path):
    tokenizer = request.getfixturevalue(name)
    tokenizer.save(tmp_path / "new" / "folder")
    again = Tokenizer.from_directory(tmp_path / "new" / "folder")
    assert again == tokenizer
    assert hash(again) == hash(tokenizer)
    assert again.eos_ids == tokenizer.eos_ids
    assert again.bos_id == tokenizer.bos_id
    assert again.pad_id == tokenizer.pad_id
    assert again.special_ids == tokenizer.special_ids
    assert again.chat_template == tokenizer.chat_template
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.first_difference(tokenizer) is None
    text = "Hi 123 <|im_end|> é 中 😀  x"
    assert again.encode(text) == tokenizer.encode(text)


def test_save_does_not_hide_behind_an_older_template(smollm2, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("old")
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*remove it"):
        smollm2.save(tmp_path)


def test_tokenizers_that_differ(smollm2, bytelevel, smollm2_fields):
    assert smollm2 != bytelevel
    assert smollm2 != "smollm2"
    assert smollm2.fingerprint() != bytelevel.fingerprint()
    ident, mine, theirs = smollm2.first_difference(bytelevel)
    assert ident == 0
    assert (mine, theirs) == ("<|endoftext|>", bytelevel.id_to_token(0))
    tokens = list(smollm2_fields["tokenizer.ggml.tokens"])
    tokens.append("<extra>")
    types = [*smollm2_fields["tokenizer.ggml.token_type"], 4]
    longer = Tokenizer.from_gguf(
        smollm2_fields
        | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    )
    assert smollm2.first_difference(longer) == (49152, None, "<extra>")
    assert longer.first_difference(smollm2) == (49152, "<extra>", None)
    assert longer.fingerprint() != smollm2.fingerprint()
    assert longer.encode("a<extra>b")[1] == 49152
    assert 49152 not in longer.special_ids


def test_encode_refuses_what_is_not_text(smollm2):
    with pytest.raises(TypeError, match="must be a str, got bytes"):
        smollm2.encode(b"x")
    with pytest.raises(TypeError, match="must be a str, got NoneType"):
        smollm2.encode(None)
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83D at character 2"):
        smollm2.encode("ab\ud83d")


def test_decode_takes_arrays_and_refuses_bad_ids(smollm2):
    ids = smollm2.encode("Hello there")
    assert smollm2.decode(np.asarray(ids, np.int32)) == "Hello there"
    assert smollm2.decode([]) == ""
    with pytest.raises(ValueError, match="49152 has no token.*0 to 49151"):
        smollm2.decode([1, 49152])
    with pytest.raises(ValueError, match="-1 has no token"):
        smollm2.decode([-1])
    with pytest.raises(TypeError, match="got float"):
        smollm2.decode([1.0])
    with pytest.raises(TypeError, match="got a bool"):
        smollm2.decode([True])
    with pytest.raises(TypeError, match="got str"):
        smollm2.decode("12")
    with pytest.raises(TypeError, match="flat list"):
        smollm2.decode(np.zeros((2, 2), np.int32))


class TestDirectory:
    @pytest.fixture
    def folder(self, tmp_path):
        vocab = {"a": 0, "b": 1, "</s>": 2, "<s>": 3}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.add_special_tokens(["<s>", "</s>"])
        backend.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def write(self, folder, name, content):
        (folder / name).write_text(json.dumps(content))

    def test_alone(self, folder):
        tokenizer = Tokenizer.from_directory(str(folder))
        assert tokenizer.vocab_size == 4
        assert tokenizer.bos_id is None
        assert tokenizer.bos_token is None
        assert tokenizer.eos_token is None
        assert tokenizer.pad_token is None
        assert tokenizer.eos_ids == ()
        assert tokenizer.chat_template is None
        assert tokenizer.encode("ab</s>") == [0, 1, 2]
        with pytest.raises(ValueError, match="no chat template"):
            ChatTemplate.from_tokenizer(tokenizer)

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in .*save"):
            Tokenizer.from_directory(tmp_path)

    def test_unreadable(self, folder):
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match="not a readable tokenizer"):
            Tokenizer.from_directory(folder)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("tokenizer_config.json", [], "must hold a JSON object, got list"),
            ("tokenizer_config.json", {"eos_token": "<end>"}, "'<end>' as eos_token"),
            ("tokenizer_config.json", {"eos_token": 3}, "must be a string"),
            ("tokenizer_config.json", {"chat_template": 3}, "must be a string"),
            (
                "tokenizer_config.json",
                {"chat_template": [{"name": "rag", "template": "x"}]},
                r"none .* named 'default'; found \['rag'\]",
            ),
            ("generation_config.json", {"eos_token_id": [2, 9]}, "names the id 9"),
            ("generation_config.json", {"eos_token_id": True}, "names the id True"),
            ("generation_config.json", {"bos_token_id": -1}, "names the id -1"),
            (
                "tokenizer_config.json",
                {"added_tokens_decoder": {"7": {"content": "<x>"}}},
                "'<x>' the id 7, but in tokenizer.json it is 4",
            ),
            (
                "tokenizer_config.json",
                {"added_tokens_decoder": {"x": {"content": "<x>"}}},
                "the key 'x'",
            ),
            ("tokenizer_config.json", {"added_tokens_decoder": []}, "an object"),
        ],
    )
    def test_bad_files(self, folder, name, content, message):
        self.write(folder, name, content)
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_directory(folder)

    def test_not_json(self, folder):
        (folder / "generation_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"generation_config\.json is not JSON"):
            Tokenizer.from_directory(folder)

    def test_every_source_of_end_tokens(self, folder):
        self.write(folder, "generation_config.json", {"eos_token_id": 3})
        self.write(folder, "tokenizer_config.json", {"eos_token": "</s>"})
        assert Tokenizer.from_directory(folder).eos_ids == (3, 2)
        self.write(folder, "generation_config.json", {"eos_token_id": [2, 3]})
        assert Tokenizer.from_directory(folder).eos_ids == (2, 3)

    def test_written_null_is_no_token(self, folder):
        self.write(folder, "generation_config.json", {"bos_token_id": 3})
        assert Tokenizer.from_directory(folder).bos_id == 3
        self.write(folder, "tokenizer_config.json", {"bos_token": None})
        self.write(folder, "special_tokens_map.json", {"bos_token": "<s>"})
        assert Tokenizer.from_directory(folder).bos_id is None

    def test_tokens_that_only_the_config_lists(self, folder):
        entry = {"content": "<x>", "special": True, "lstrip": False}
        self.write(
            folder,
            "tokenizer_config.json",
            {"added_tokens_decoder": {"4": entry, "2": {"content": "</s>"}}},
        )
        tokenizer = Tokenizer.from_directory(folder)
        assert tokenizer.encode("a<x>b") == [0, 4, 1]
        assert 4 in tokenizer.special_ids

    def test_order_of_chat_templates(self, folder):
        named = [{"name": "default", "template": "C"}, {"name": "rag", "template": "x"}]
        self.write(folder, "tokenizer_config.json", {"chat_template": named})
        assert Tokenizer.from_directory(folder).chat_template == "C"
        self.write(folder, "chat_template.json", {"chat_template": "B"})
        assert Tokenizer.from_directory(folder).chat_template == "B"
        (folder / "chat_template.jinja").write_text("A")
        assert Tokenizer.from_directory(folder).chat_template == "A"
