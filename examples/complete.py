"""Continue a text: the most likely way, and three ways at random from one prompt."""

import afterglow

with afterglow.load("smollm2", fetch=True) as model:
    answer = model.complete("The three primary colours are", max_tokens=20, stop=["."])
    print(answer.text, f"({answer.finish_reason}, {answer.usage.generated_tokens} tokens)")

    start = "There are four seasons in the year: spring, summer, autumn and winter. My favourite of them is"
    draws = model.complete(start, n=3, temperature=0.9, seed=7, max_tokens=16)
    for choice, usage in zip(draws.choices, draws.usages, strict=True):
        print(f"[{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused]", choice.text.replace("\n", " "))

    sure = model.complete("One, two, three,", max_tokens=3, logprobs=2).choices[0]
    for token, logprob, likeliest in zip(sure.tokens, sure.logprobs, sure.alternatives, strict=True):
        others = ", ".join(f"{model.detokenize([other])!r} {value:.2f}" for other, value in likeliest)
        print(f"{model.detokenize([token])!r} {logprob:.2f}   likeliest: {others}")
