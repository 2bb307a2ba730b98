"""Writes the golden files of this folder; run by hand, with transformers.

    python tests/golden/text/make_golden.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

It needs transformers, sentencepiece and gguf, which the tests do not.

References:

* ``smollm2.json``: `transformers` on SmolLM2's own definition (single digits, then
  byte-level BPE; every control token special). The GGUF loader of transformers is
  no reference here: it knows nothing of ``tokenizer.ggml.pre`` and leaves out the
  digits' step, which shows where white space stands before a digit, and it does
  not mark all control tokens. Without either in a string its ids must agree, and
  this script checks that they do.
* ``bytelevel/``, ``metaspace/``: two small tokenizers trained here, as
  `AutoTokenizer` loads them.
* ``named.json``: for GGUF's names of pre-tokenizers, the classes of transformers
  that define the same tokenizer on their own, on the small vocabulary. Llama 3
  has no such class: its pattern comes from `TikTokenConverter`, and that whole
  words go before merges is what its tokenizer.json says.
* ``sentencepiece.json``: a small BPE model of the sentencepiece library, as GGUF
  would store it, with the ids that the library gives.
"""

import io
import json
import sys
from pathlib import Path

import gguf
import sentencepiece
import tokenizers
import transformers
from strings import CODE, LATIN, PROSE, SPECIAL, STRINGS
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.convert_slow_tokenizer import TikTokenConverter

HERE = Path(__file__).parent
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What is <b>2 & 2</b>?\n"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Sure? 😀"},
    ],
]


def write(name, content):
    """JSON with a line for each row of the lists, so that changes can be read."""
    dump = lambda value: json.dumps(value, separators=(",", ":"))
    parts = []
    for key, value in content.items():
        rows = [dump(row) for row in value] if isinstance(value, list) else None
        text = dump(value) if rows is None else "[\n" + ",\n".join(rows) + "\n]"
        parts.append(f"{dump(key)}:{text}")
    (HERE / name).write_text("{" + ",\n".join(parts) + "}\n")


def cases(encode, decode):
    """Ids with and without the tokens that the post-processor adds, and back."""
    rows = []
    for text in STRINGS:
        ids = encode(text, True)
        rows.append([text, encode(text, False), ids, decode(ids)])
    return rows


def hugging_face(tokenizer):
    return {
        "cases": cases(
            lambda text, special: tokenizer(text, add_special_tokens=special).input_ids,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        ),
        "chats": [
            [
                messages,
                tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt
                ),
                prompt,
            ]
            for messages in CONVERSATIONS
            for prompt in (True, False)
            if tokenizer.chat_template
        ],
    }


def smollm2(path):
    fields = gguf.GGUFReader(path).fields
    get = lambda name: fields["tokenizer." + name].contents()
    tokens, types = get("ggml.tokens"), get("ggml.token_type")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in get("ggml.merges")],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(
                add_prefix_space=False, trim_offsets=True, use_regex=True
            ),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
    backend.add_special_tokens(control)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=get("chat_template"),
    )
    loaded = transformers.AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name
    )
    same = 0
    for text in STRINGS:
        if any(char.isnumeric() for char in text) or "<" in text:
            continue
        assert reference(text).input_ids == loaded(text).input_ids, text
        same += 1
    print("transformers' GGUF loader agrees on", same, "strings")
    write("smollm2.json", hugging_face(reference))


def train(pattern, normalizer=None):
    """A byte-level BPE on this folder's strings."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([s for s in STRINGS if s not in SPECIAL], trainer)
    return backend


def byte_level():
    """In the manner of Llama 3: added BOS, two end tokens, template in a file."""
    folder = HERE / "bytelevel"
    folder.mkdir(exist_ok=True)
    pattern = TikTokenConverter().pattern
    backend = train(pattern, normalizers.NFC())
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens(names)
    backend.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    bos = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
            ),
        ]
    )
    backend.enable_truncation(8)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": [bos + 2, bos], "pad_token_id": bos}
    text = json.dumps(generation, indent=1) + "\n"
    (folder / "generation_config.json").write_text(text)
    (folder / "chat_template.jinja").write_text(CHAT)
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    write("bytelevel.json", hugging_face(loaded))


def metaspace():
    """In the manner of Llama 2: byte fallback, a space in front of the text."""
    folder = HERE / "metaspace"
    folder.mkdir(exist_ok=True)
    backend = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        min_frequency=2,
        show_progress=False,
        special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))],
        limit_alphabet=120,
    )
    backend.train_from_iterator([*PLAIN], trainer)
    state = json.loads(backend.to_str())
    # The bytes are ordinary tokens; only training had to be told of them.
    state["added_tokens"] = state["added_tokens"][: len(special)]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    special_map = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    text = json.dumps(special_map, indent=1) + "\n"
    (folder / "special_tokens_map.json").write_text(text)
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    write("metaspace.json", hugging_face(loaded))


def named():
    """What transformers' own classes make of one small vocabulary."""
    backend = train(TikTokenConverter().pattern)
    model = json.loads(backend.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    end = "<|endoftext|>"
    vocab[end] = len(vocab)
    rows = {}
    for name, kind in (
        ("gpt-2", transformers.GPT2Tokenizer),
        ("qwen2", transformers.Qwen2Tokenizer),
    ):
        reference = kind(vocab=dict(vocab), merges=merges, unk_token=end)
        assert len(reference) == len(vocab)
        rows[name] = reference.backend_tokenizer
    llama = tokenizers.Tokenizer(
        models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=True)
    )
    pattern = tokenizers.Regex(TikTokenConverter().pattern)
    llama.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rows["llama-bpe"] = llama
    for one in rows.values():
        one.add_special_tokens([end])
    tokens = sorted(vocab, key=vocab.__getitem__)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == end else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": vocab[end],
        "tokenizer.ggml.add_bos_token": False,
    }
    ids = {
        name: [one.encode(text, add_special_tokens=False).ids for text in STRINGS]
        for name, one in rows.items()
    }
    write("named.json", {"fields": fields, "strings": STRINGS, "ids": ids})


def sentence_piece():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*PROSE, *CODE, *LATIN]),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool_call>"],
        control_symbols=["<|im_end|>"],
        num_threads=1,
        minloglevel=2,
    )
    lib = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = range(lib.vocab_size())
    kinds = [
        2 if lib.is_unknown(i) else 3 if lib.is_control(i) else 6 if lib.is_byte(i)
        else 4 if lib.id_to_piece(i) == "<tool_call>" else 1
        for i in size
    ]  # fmt: skip
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [lib.id_to_piece(i) for i in size],
        "tokenizer.ggml.scores": [lib.get_score(i) for i in size],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": lib.bos_id(),
        "tokenizer.ggml.eos_token_id": lib.eos_id(),
        "tokenizer.ggml.unknown_token_id": lib.unk_id(),
    }
    # Text that spells a control token is text to the library and the token to us.
    plain = [s for s in STRINGS if not any(t in s for t in ("<s>", "<|im_end|>"))]
    rows = [[s, lib.encode(s), lib.decode(lib.encode(s))] for s in plain]
    write("sentencepiece.json", {"fields": fields, "cases": rows})


PLAIN = [s for s in STRINGS if s not in SPECIAL]

if __name__ == "__main__":
    smollm2(Path(sys.argv[1]))
    byte_level()
    metaspace()
    named()
    sentence_piece()
