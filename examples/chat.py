"""A conversation of several turns, an edit, and a look at what memory did for each."""

import afterglow

QUESTIONS = ["What is the capital of France?", "And of Italy?", "Which of the two is larger?"]

with afterglow.load("smollm2", fetch=True) as model:
    messages = [("system", "You are a helpful assistant. Answer in one short sentence.")]
    for question in QUESTIONS:
        messages.append(("user", question))
        answer = model.complete(model.chat_prompt(messages), max_tokens=40)
        messages.append(("assistant", answer.text))
        print(f"> {question}\n{answer.text}")
        print(f"  {answer.usage.cached} of {answer.usage.prompt} prompt tokens were in memory already\n")

    messages[-2] = ("user", "Which of the two is older?")  # edit the last question and ask again
    prompt = model.chat_prompt(messages[:-1])
    explained = model.explain(prompt)
    print(f"edited: {explained.reused} of {explained.prompt} tokens can be reused ({explained.cause})")
    print(model.complete(prompt, max_tokens=40).text)
