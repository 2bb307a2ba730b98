"""Drafters by name."""

import pytest

import specjax
from specjax import drafters
from specjax.testing import tiny_model

MODEL = tiny_model()


def test_a_target_makes_drafters_of_itself_by_name():
    made = drafters.for_target("early_exit:1", 3, MODEL)
    assert made.drafter is drafters.early_exit(MODEL.target, 1, 3)
    one, two = (
        drafters.for_target(name, 3, MODEL)
        for name in ("layer_skip:1", "layer_skip:1-1")
    )
    assert one.drafter is two.drafter and one.params is None
    assert drafters.for_target("bfloat16", 3, MODEL).drafter.spec.name == "bfloat16"
    whole, groups = (drafters.for_target(n, 3, MODEL) for n in ("int8", "int4:16"))
    assert whole.drafter is drafters.quantized(MODEL, 3).drafter
    assert groups.drafter is drafters.quantized(MODEL, 3, bits=4, group=16).drafter
    assert groups.drafter.spec.name == "int4"
    sparse = drafters.for_target("sparse_kv:2-30", 3, MODEL)
    assert sparse == drafters.sparse_kv(MODEL, 3, sinks=2, window=30)
    recycling = drafters.for_target("token_recycling", 3, MODEL)
    assert recycling == (drafters.token_recycling(256, 3), None)
    plain = drafters.for_target("plain", 0, MODEL)
    assert plain == (drafters.plain(), None)


@pytest.mark.parametrize(
    ("name", "gamma", "match"),
    [
        (
            "best",
            3,
            "known drafters: lookahead, plain, .*, suffix, early_exit:BLOCKS",
        ),
        ("early_exit", 3, "write early_exit:BLOCKS"),
        ("early_exit:half", 3, "write early_exit:BLOCKS"),
        ("layer_skip:3-", 3, "write layer_skip:FIRST-LAST"),
        ("bfloat16:1", 3, "write bfloat16"),
        ("int4:16-32", 3, r"write int4\[:GROUP\]"),
        ("sparse_kv:508", 3, "write sparse_kv:SINKS-WINDOW"),
        ("early_exit:1", 0, "gamma=0"),
        ("model", 3, "'model' needs draft_model, .* drafters.from_model"),
    ],
)
def test_wrong_names_say_what_would_be_right(name, gamma, match):
    with pytest.raises(ValueError, match=match):
        drafters.check_name(name, gamma)


def test_a_draft_model_goes_with_one_name():
    drafters.check_name("model", 3, has_draft=True)
    assert "model[:NODES]" in drafters.usages()
    for name in ("plain", "early_exit:1", "best"):
        with pytest.raises(
            ValueError, match=f"drafter 'model'; the drafter is {name!r}"
        ):
            drafters.check_name(name, 3, has_draft=True)
    with pytest.raises(ValueError, match="gamma=0"):
        drafters.check_name("model", 0, has_draft=True)
    drafters.check_name("model:12", 3, has_draft=True)
    assert drafters.draft_shape("model", 3) == 3
    tree = drafters.draft_shape("model:12", 3)
    assert (tree.n_nodes, tree.max_depth) == (12, 3) and not tree.has_gaps
    for name in ("model:0", "model:3-4", "model:x"):
        with pytest.raises(ValueError, match=r"write model\[:NODES\]"):
            drafters.check_name(name, 3, has_draft=True)
    with pytest.raises(ValueError, match="needs draft_model"):
        drafters.for_target("model", 3, MODEL)


def test_what_the_target_lacks_is_said_when_it_is_there():
    with pytest.raises(ValueError, match=r"exit_block=9 must be in \[1, 2\)"):
        drafters.for_target("early_exit:9", 3, MODEL)
    with pytest.raises(ValueError, match="ascending blocks"):
        drafters.for_target("layer_skip:1-4", 3, MODEL)
    with pytest.raises(ValueError, match="made of its target"):
        drafters.by_name("early_exit:1", 3)


@pytest.mark.slow
def test_generate_takes_their_names():
    prompts = [[1, 2, 3, 4]]
    make = lambda drafter: specjax.generate(
        MODEL, prompts, drafter=drafter, gamma=3, max_new_tokens=8, exact=True, width=4
    )
    assert make("early_exit:1")[0].ids == make(None)[0].ids
