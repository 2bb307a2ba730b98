import json

import pytest

from specjax.testing.tiny import tiny_model
from specjax.text import ChatTemplate, Tokenizer
from specjax.weights import save_orbax

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    # Tests must not write into the user's cache directory.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory):
    """A checkpoint without a chat template."""
    path = tmp_path_factory.mktemp("plain") / "model"
    save_orbax(path, tiny_model(eos_ids=(7,)))
    return path


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """The same parameters with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    model = tiny_model(eos_ids=(7,))
    model.need_tokenizer().save(folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_directory(folder / "tokenizer")
    object.__setattr__(model, "tokenizer", tokenizer)
    object.__setattr__(model, "chat_template", ChatTemplate.from_tokenizer(tokenizer))
    save_orbax(folder / "model", model)
    return folder / "model"


@pytest.fixture
def write(tmp_path):
    def write_prompts(*records, name="in.jsonl"):
        path = tmp_path / name
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write_prompts


@pytest.fixture
def read():
    def read_results(path):
        text = path.read_text("utf-8")
        assert not text or text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    return read_results
