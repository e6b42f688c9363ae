"""A conversation: what the model sees of it, how an answer ends early, where there is no room."""

import pytest

import llmc
from llmc import SamplingParams
from llmc.runtime.chat import Chat


@pytest.fixture(scope="module")
def llm(case_tp2):
    with llmc.LLM(case_tp2) as loaded:
        yield loaded


def test_an_answer_is_what_the_whole_conversation_leads_to(llm):
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    chat = Chat(llm, params)
    first = "".join(piece.text for piece in chat.say("the"))
    second = "".join(piece.text for piece in chat.say("fox"))
    said = [message["content"] for message in chat.messages]
    assert said == ["the", first, "fox", second]
    prompt = llm.tokenizer.encode(f"<user>the<assistant>{first}<user>fox<assistant>").ids
    assert second == llm.generate([prompt], params)[0].text
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_a_closed_answer_is_kept_as_far_as_it_came(llm):
    chat = Chat(llm, SamplingParams(max_tokens=20, ignore_eos=True))
    answer = chat.say("the")
    text = next(answer).text + next(answer).text
    answer.close()
    assert chat.messages == [{"role": "user", "content": "the"},
                             {"role": "assistant", "content": text}]
    assert list(chat.say("fox"))  # the KV cache is free again


def test_a_conversation_that_outgrew_the_kv_cache_says_so_and_forgets_the_message(llm):
    chat = Chat(llm, SamplingParams(max_tokens=4, ignore_eos=True))
    list(chat.say("the"))
    before = list(chat.messages)
    with pytest.raises(llmc.LlmcError, match=r"the conversation has \d+ tokens, the KV cache has "
                                             r"room for 64; say less, begin another, or compile"):
        chat.say("quick brown 123456789 " * 9)
    assert chat.messages == before
    assert list(chat.say("fox"))


def test_a_conversation_has_one_answer_at_a_time(llm):
    with pytest.raises(llmc.LlmcError, match="n 2 answers cannot all be part of a conversation"):
        Chat(llm, SamplingParams(n=2, temperature=1.0))
