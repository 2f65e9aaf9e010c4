"""A conversation of several turns and an edit, with the prefix hits of each turn."""

import afterglow

QUESTIONS = ["What is the capital of France?", "And of Italy?", "Which of the two is larger?"]


def describe_usage(chat: afterglow.Conversation) -> str:
    usage = chat.last_response.usage
    return f"  {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached\n"


with afterglow.load("smollm2", fetch=True) as model:
    chat = afterglow.Conversation(model, system="You are a helpful assistant. Answer in one sentence.", max_tokens=40)
    for question in QUESTIONS:
        print(f"> {question}\n{chat.ask(question).text}\n{describe_usage(chat)}")

    chat.edit(5, "Which of the two is older?")  # replaces the last question and removes its answer
    explanation = model.explain(model.apply_chat_template(chat.messages))
    print(
        f"edited: {explanation.reused_entries} of {explanation.prompt_entries} tokens can be reused "
        f"({explanation.cause})"
    )
    print(f"{chat.regenerate().text}\n{describe_usage(chat)}")
