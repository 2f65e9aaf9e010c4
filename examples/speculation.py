"""Speculative decoding: the text is the same; usage shows the accepted draft tokens."""

import afterglow

SHOPPING = "flour, butter, sugar, eggs, milk, salt, apples, pears, plums, cherries, walnuts, honey, cinnamon, yeast"
PROMPT = f"The list: {SHOPPING}.\nThe same list again: {SHOPPING[:40]}"

with afterglow.load("smollm2", fetch=True) as model:
    completion = model.complete(PROMPT, max_tokens=40, temperature=0)
    print(completion.text)
    print(f"{completion.usage.accepted_tokens} of {completion.usage.draft_tokens} draft tokens were accepted")

# A fixed number of draft tokens, even if it is slower: for experiments.
with afterglow.load("smollm2", engine=afterglow.EngineSettings(speculation=4)) as model:
    again = model.complete(PROMPT, max_tokens=40, temperature=0)
    print(again.text == completion.text, again.usage.draft_tokens > 0)
