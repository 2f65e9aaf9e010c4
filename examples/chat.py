"""A conversation of several turns, an edit, and a look at what memory did for each."""

import afterglow

QUESTIONS = ["What is the capital of France?", "And of Italy?", "Which of the two is larger?"]


def told(talk: afterglow.Conversation) -> str:
    usage = talk.last_response.usage
    return f"  {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were in memory already\n"


with afterglow.load("smollm2", fetch=True) as model:
    talk = afterglow.Conversation(model, system="You are a helpful assistant. Answer in one sentence.", max_tokens=40)
    for question in QUESTIONS:
        print(f"> {question}\n{talk.ask(question).text}\n{told(talk)}")

    talk.edit(5, "Which of the two is older?")  # the last question; its answer is forgotten
    explained = model.explain(model.apply_chat_template(talk.messages))
    print(f"edited: {explained.reused_entries} of {explained.prompt_entries} tokens can be reused ({explained.cause})")
    print(f"{talk.regenerate().text}\n{told(talk)}")
