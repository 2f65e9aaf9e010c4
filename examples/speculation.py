"""Guessing ahead: the answer is the same, and what was guessed right is in its usage."""

import afterglow

SHOPPING = "flour, butter, sugar, eggs, milk, salt, apples, pears, plums, cherries, walnuts, honey, cinnamon, yeast"
PROMPT = f"The list: {SHOPPING}.\nThe same list again: {SHOPPING[:40]}"

with afterglow.load("smollm2", fetch=True) as model:
    answer = model.complete(PROMPT, max_tokens=40, temperature=0)
    print(answer.text)
    print(f"{answer.usage.accepted_tokens} of {answer.usage.draft_tokens} guesses were right")

# A fixed number of guesses, whether they pay or not: for experiments.
with afterglow.load("smollm2", engine=afterglow.EngineSettings(speculation=4)) as model:
    again = model.complete(PROMPT, max_tokens=40, temperature=0)
    print(again.text == answer.text, again.usage.draft_tokens > 0)
