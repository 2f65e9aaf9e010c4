"""Continue a prompt: greedily, with three samples that share one prefill, and with logprobs."""

import afterglow

with afterglow.load("smollm2", fetch=True) as model:
    completion = model.complete("The three primary colours are", max_tokens=20, stop=["."])
    print(completion.text, f"({completion.finish_reason}, {completion.usage.generated_tokens} tokens)")

    prompt = "There are four seasons in the year: spring, summer, autumn and winter. My favourite of them is"
    samples = model.complete(prompt, n=3, temperature=0.9, seed=7, max_tokens=16)
    for choice, usage in zip(samples.choices, samples.usages, strict=True):
        print(f"[{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached]", choice.text.replace("\n", " "))

    choice = model.complete("One, two, three,", max_tokens=3, logprobs=2).choices[0]
    for token, logprob, alternatives in zip(choice.tokens, choice.logprobs, choice.alternatives, strict=True):
        listed = ", ".join(f"{model.detokenize([other])!r} {value:.2f}" for other, value in alternatives)
        print(f"{model.detokenize([token])!r} {logprob:.2f}   alternatives: {listed}")
