"""Conversations: prompts, closed answers, and the limits of the KV cache."""

import shutil

import pytest

import llmc
from llmc import SamplingParams
from llmc.runtime.chat import Chat

pytestmark = pytest.mark.usefixtures("decisive")


@pytest.fixture(scope="module")
def llm(case_tp2):
    with llmc.LLM(case_tp2) as loaded:
        yield loaded


def test_an_answer_equals_that_of_the_whole_conversation(llm):
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    chat = Chat(llm, params)
    first = "".join(piece.text for piece in chat.say("the"))
    second = "".join(piece.text for piece in chat.say("fox"))
    said = [message["content"] for message in chat.messages]
    assert said == ["the", first, "fox", second]
    prompt = llm.tokenizer.encode(f"<user>the<assistant>{first}<user>fox<assistant>").ids
    assert second == llm.generate([prompt], params)[0].text
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_a_closed_answer_is_kept_partially(llm):
    chat = Chat(llm, SamplingParams(max_tokens=20, ignore_eos=True))
    answer = chat.say("the")
    text = next(answer).text + next(answer).text
    answer.close()
    assert chat.messages == [{"role": "user", "content": "the"},
                             {"role": "assistant", "content": text}]
    assert list(chat.say("fox"))  # the KV cache is free again


def test_a_message_beyond_the_kv_cache_is_refused_and_dropped(llm):
    chat = Chat(llm, SamplingParams(max_tokens=4, ignore_eos=True))
    list(chat.say("the"))
    before = list(chat.messages)
    with pytest.raises(llmc.LlmcError, match=r"the conversation has \d+ tokens, the KV cache has "
                                             r"room for 64; shorten the message, start another"):
        chat.say("quick brown 123456789 " * 9)
    assert chat.messages == before
    assert list(chat.say("fox"))


def test_a_conversation_has_one_answer_at_a_time(llm):
    with pytest.raises(llmc.LlmcError, match="n is 2, a conversation has one answer per message"):
        Chat(llm, SamplingParams(n=2, temperature=1.0))


@pytest.fixture(scope="module")
def templated(case_tp2, tmp_path_factory):
    """Factory by chat template: a model with it."""
    case = shutil.copytree(case_tp2, tmp_path_factory.mktemp("chat") / "case")
    with llmc.LLM(case) as llm:
        path = case / llm.manifest.tokenizer.chat_template

        def write(template):
            path.write_text(template)
            return llm
        yield write


def test_a_template_gets_all_fields_of_a_message(templated):
    llm = templated("{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.content }}{% endfor %}")
    assert llm.chat_prompt([{"role": "user", "name": "fox", "content": "the"}]) == \
        llm.tokenizer.encode("userfoxthe", add_special_tokens=False).ids


@pytest.mark.parametrize(("template", "reason"), [
    ("{{ messages + 1 }}", "TypeError: can only concatenate list"),
    ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ("{{ messages[0].content.index('z') }}", "ValueError: substring not found"),
    ("{{ messages[0].content.join() }}", "TypeError: "),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion"),
    ("{{ raise_exception('no system\nrole') }}", "(no system role)"),
    ("{{ raise_exception(3) }}", "(3)"),
    ("{{ nothing.here }}", "'nothing' is undefined"),
    ("{% for m in messages %}", "Unexpected end of template"),
    ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
    ("{% for i in range(99999) %}{{ 'the fox ' * 999 }}{% endfor %}",
     "it writes more than 16777216 characters"),
])
def test_template_errors_become_llmc_errors(templated, template, reason):
    llm = templated(template)
    with pytest.raises(llmc.LlmcError, match="^the chat template '.*chat_template.jinja' cannot be "
                                             "used") as error:
        llm.chat_prompt("the")
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith("in the format that the model expects")


def test_an_invalid_tokenizer_config_is_refused(templated):
    llm = templated("{{ eos_token }}")
    path = (llm.case_dir / llm.manifest.tokenizer.chat_template).with_name("tokenizer_config.json")
    before = path.read_text()
    for content in ("{", "[]", '"text"'):
        path.write_text(content)
        with pytest.raises(llmc.LlmcError, match="^the chat template '.*' cannot be used"):
            llm.chat_prompt("the")
    path.write_text(before)
    assert llm.chat_prompt("the") == [2]


@pytest.mark.parametrize(("messages", "message"), [
    ([], "messages is []; give a list like"),
    ({"role": "user", "content": "a"}, "messages is {'content': 'a', 'role': 'user'}; give a list"),
    (["the"], "message 0 is 'the'; give one like"),
    ([{"content": "a"}], "the role of message 0 is missing; give a text"),
    ([{"role": 3, "content": "a"}], "the role of message 0 is 3; give a text"),
    ([{"role": "user", "content": None}], "the content of message 0 is None; give a text"),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": ["a"]}],
     "the content of message 1 is ['a']; give a text"),
])
def test_an_invalid_conversation_is_refused(llm, messages, message):
    with pytest.raises(llmc.LlmcError) as error:
        llm.chat_prompt(messages)
    assert str(error.value).startswith(message)
