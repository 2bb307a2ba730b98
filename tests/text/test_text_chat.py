import datetime

import pytest

from specjax.text import ChatTemplate

USER = [{"role": "user", "content": "Hi <b>&</b> 'é'"}]


def render(source, messages=USER, **extra):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(
        messages, **extra
    )


def test_smollm2_conversation(smollm2):
    template = ChatTemplate.from_tokenizer(smollm2)
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = smollm2.encode(text, add_special_tokens=False)
    assert ids.count(smollm2.bos_id) == 3
    assert smollm2.decode(ids) == text


def test_generation_prompt():
    source = "x{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "x>"
    assert render(source, add_generation_prompt=False) == "x"


def test_tokens_are_printed_where_there_are_any():
    assert render("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}") == "<s>|</s>|"
    assert render("{{ pad_token is defined }} {{ bos_token is defined }}") == (
        "False True"
    )


def test_blocks_leave_no_white_space():
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n{% endif %}\n"
    assert render(source + "{% endfor %}\n") == "Hi <b>&</b> 'é'\n"


def test_json_is_not_escaped():
    source = "{{ messages[0].content | tojson }}"
    assert render(source) == "\"Hi <b>&</b> 'é'\""
    assert render("{{ {'b': 1, 'a': [2]} | tojson(sort_keys=true) }}") == (
        '{"a": [2], "b": 1}'
    )
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_clock():
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", now=lambda: datetime.datetime(2024, 7, 4)
    )
    assert template.render(USER) == "04 Jul 2024"


def test_loop_controls_and_generation_blocks():
    source = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
    assert render(source + "{% endfor %}") == "1"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_extra_variables():
    source = "{{ tools }} {{ documents }} {{ thinking is defined }}"
    assert render(source) == "None None False"
    assert render(source, tools=["f"], thinking=True) == "['f'] None True"


def test_other_keys_of_messages_are_passed_on():
    messages = [{"role": "user", "content": "", "name": "Ann"}]
    assert render("{{ messages[0].name }}", messages) == "Ann"


def test_the_templates_own_message():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="failed: roles must alternate$"):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at_all }}", "UndefinedError.*nothing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_failing_templates(source, message):
    with pytest.raises(ValueError, match=f"the chat template failed: {message}"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(ValueError, match="SecurityError"):
        render(source)


def test_a_hidden_attribute_prints_nothing():
    assert render("[{{ raise_exception.__globals__ }}]") == "[]"


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="SecurityError"):
        render("{{ messages[0].pop('role') }}", messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_bad_source():
    with pytest.raises(ValueError, match=r"not valid Jinja \(line 2\)"):
        ChatTemplate("a\n{% if %}")
    with pytest.raises(TypeError, match="a chat template must be a str"):
        ChatTemplate(None)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list .* got str"),
        ({"role": "user", "content": "Hi"}, "must be a list .* got dict"),
        (None, "got NoneType"),
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] must be .* got str"),
        ([*USER, {"role": "user"}], r"messages\[1\] has no 'content'; .*\['role'\]"),
        ([{"content": "Hi"}], r"messages\[0\] has no 'role'"),
        ([{"role": 3, "content": "Hi"}], r"\['role'\] must be a string, got int"),
        ([{"role": "user", "content": []}], "must be a string, got list: only text"),
        ([{"role": "", "content": "Hi"}], "is empty"),
    ],
)
def test_bad_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        render("x", messages)
