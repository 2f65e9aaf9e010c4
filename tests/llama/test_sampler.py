"""C15: the sampler chain has the documented order, every option has an effect, temperature 0 is argmax."""

from __future__ import annotations

import math

import numpy as np
import pytest

from afterglow.errors import InvalidArgument, UnsupportedOption
from afterglow.llama.library.loader import get_library
from afterglow.llama.sampler import SamplerChain
from afterglow.llama.sampling import LIMITS, Sampling

PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
A, B, C = 70, 71, 72


@pytest.fixture
def chain(open_model, stack):
    """Return a function that creates a chain on the tiny model."""
    model = open_model("attention")

    def make(**options) -> SamplerChain:
        return stack.enter_context(SamplerChain(model, Sampling(**options)))

    return make


@pytest.fixture
def logits(open_model):
    """Three likely tokens A > B > C, the rest far below."""
    row = np.full(open_model("attention").vocabulary.size, -20.0, dtype=np.float32)
    row[[A, B, C]] = 3.0, 2.0, 1.0
    return row


def draw(chain: SamplerChain, logits: np.ndarray, count: int = 400) -> dict[int, float]:
    """Return the share of each token in `count` draws."""
    drawn = [chain.sample(logits) for _ in range(count)]
    return {token: drawn.count(token) / count for token in set(drawn)}


@pytest.mark.native
def test_c15_temperature_zero_is_argmax_even_if_the_margin_is_tiny(chain):
    """If only the temperature stage were skipped, it would be a random draw."""
    noise = np.random.default_rng(0).normal(size=288).astype(np.float32)
    for seed in range(50):
        assert chain(temperature=0, seed=seed).sample(noise) == int(noise.argmax())


@pytest.mark.native
def test_c15_temperature_zero_applies_bias_and_penalties(chain, logits):
    assert chain(temperature=0, logit_bias={A: -50.0}).sample(logits) == B
    repeating = chain(temperature=0, presence_penalty=5.0, repeat_last_n=64)
    repeating.accept(A)
    assert repeating.sample(logits) == B


@pytest.mark.native
def test_c15_a_draw_follows_the_softmax(chain, logits):
    shares = draw(chain(**PLAIN, seed=1), logits, 4000)
    weights = {token: math.exp(logit) for token, logit in ((A, 3), (B, 2), (C, 1))}
    for token, weight in weights.items():
        assert shares[token] == pytest.approx(weight / sum(weights.values()), abs=0.03)


@pytest.mark.native
def test_c15_a_seed_determines_every_draw_and_none_is_random(chain, logits):
    flat = np.zeros_like(logits)

    def sequence(**options):
        sampler = chain(**PLAIN, **options)
        return [sampler.sample(flat) for _ in range(12)]

    assert sequence(seed=7) == sequence(seed=7)
    assert sequence(seed=7) != sequence(seed=8)
    assert sequence() != sequence()
    assert sequence(seed=-1) != sequence(seed=-1)


EFFECTS = {
    "top_k": ({"top_k": 1}, {A}),
    "top_p": ({"top_p": 0.5}, {A}),
    "min_p": ({"min_p": 0.5}, {A}),
    "typical_p": ({"typical_p": 0.3}, {A}),
    "top_n_sigma": ({"top_n_sigma": 0.05}, {A}),
    "temperature": ({"temperature": 0.01}, {A}),
    "xtc": ({"xtc_probability": 1.0, "xtc_threshold": 0.2}, {B, C}),
    "logit_bias": ({"logit_bias": {A: float("-inf")}}, {B, C}),
    "mirostat": ({"mirostat": 1, "mirostat_tau": 0.01, "mirostat_eta": 1.0}, {A}),
    "mirostat_v2": ({"mirostat": 2, "mirostat_tau": 0.01, "mirostat_eta": 1.0}, {A}),
}


@pytest.mark.native
@pytest.mark.parametrize("name", EFFECTS)
def test_c15_each_option_has_its_documented_effect(chain, logits, name):
    options, allowed = EFFECTS[name]
    assert set(draw(chain(**PLAIN, seed=3), logits)) >= {A, B, C}
    sampler = chain(**{**PLAIN, **options}, seed=3)
    if name.startswith("mirostat"):  # it adapts its threshold to accepted tokens
        for _ in range(30):
            sampler.accept(sampler.sample(logits))
    assert set(draw(sampler, logits, 100)) <= allowed


@pytest.mark.native
@pytest.mark.parametrize("options", [{"repeat_penalty": 9.0}, {"frequency_penalty": 9.0}, {"presence_penalty": 9.0}])
def test_c15_penalties_lower_accepted_tokens(chain, logits, options):
    sampler = chain(**PLAIN, seed=1, **options)
    assert A in draw(sampler, logits)
    sampler.accept(A)
    assert draw(sampler, logits).get(A, 0) < 0.2


@pytest.mark.native
def test_c15_dry_prevents_a_repeated_phrase(chain, logits):
    sampler = chain(**PLAIN, seed=1, dry_multiplier=50.0, dry_allowed_length=2)
    for token in (80, 81, 82, A, 90, 80, 81, 82):
        sampler.accept(token)
    assert A not in draw(sampler, logits)
    allowed = chain(**PLAIN, seed=1, dry_multiplier=50.0, dry_allowed_length=9)
    for token in (80, 81, 82, A, 90, 80, 81, 82):
        allowed.accept(token)
    assert A in draw(allowed, logits)


PHRASE = (80, 81, 82, A, 90, 80, 81, 82)


def accept_phrase(chain: SamplerChain) -> SamplerChain:
    for token in PHRASE:
        chain.accept(token)
    return chain


@pytest.mark.native
def test_c15_dry_grows_with_its_base_and_stops_at_its_range_and_breakers(chain, logits):
    gentle = accept_phrase(chain(**PLAIN, seed=1, dry_multiplier=0.1, dry_base=1.0, dry_allowed_length=1))
    steep = accept_phrase(chain(**PLAIN, seed=1, dry_multiplier=0.1, dry_base=10.0, dry_allowed_length=1))
    assert draw(gentle, logits)[A] > 0.4
    assert A not in draw(steep, logits)
    short = accept_phrase(chain(**PLAIN, seed=1, dry_multiplier=50.0, dry_allowed_length=2, dry_penalty_last_n=4))
    assert A in draw(short, logits)
    piece = short.model.vocabulary.token_to_piece(82).decode()
    broken = accept_phrase(
        chain(**PLAIN, seed=1, dry_multiplier=50.0, dry_allowed_length=2, dry_sequence_breakers=(piece,))
    )
    assert A in draw(broken, logits)


@pytest.mark.native
def test_c15_the_exponent_changes_the_dynamic_temperature(chain, logits):
    options = {**PLAIN, "temperature": 2.0, "dynatemp_range": 2.0, "seed": 1}
    flat = draw(chain(**options, dynatemp_exponent=0.1), logits)
    sharp = draw(chain(**options, dynatemp_exponent=3.0), logits)
    assert sharp[A] > flat[A] + 0.05


@pytest.mark.native
def test_c15_dynamic_temperature_sharpens_a_low_entropy_row(chain, logits):
    dynamic = draw(chain(**{**PLAIN, "temperature": 2.0}, dynatemp_range=2.0, seed=1), logits)
    plain = draw(chain(**{**PLAIN, "temperature": 2.0}, seed=1), logits)
    assert dynamic[A] > plain[A] + 0.1


@pytest.mark.native
def test_c15_the_order_is_the_documented_one(chain):
    sampler = chain(
        temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, typical_p=0.9, top_n_sigma=2, xtc_probability=0.5,
        repeat_penalty=1.1, dry_multiplier=1, logit_bias={A: 1.0}, dynatemp_range=0.1,
    )  # fmt: skip
    assert get_names(sampler) == [
        "logit-bias", "penalties", "dry", "top-n-sigma", "top-k", "typical", "top-p", "min-p", "xtc", "temp-ext",
        "dist",
    ]  # fmt: skip


def get_names(sampler: SamplerChain) -> list[str]:
    symbols, text = get_library().symbols, get_library().decode_string
    links = [
        symbols.llama_sampler_chain_get(sampler.pointer, i)
        for i in range(symbols.llama_sampler_chain_n(sampler.pointer))
    ]
    return [text(symbols.llama_sampler_name(link)).lstrip("+?") for link in links]


@pytest.mark.native
def test_c15_only_the_listed_samplers_apply_in_their_order(chain, logits):
    sampler = chain(samplers=("min_p", "top_k", "infill"), top_k=3, min_p=0.5, repeat_penalty=1.1, logit_bias={A: 1.0})
    assert get_names(sampler) == ["logit-bias", "min-p", "top-k", "infill", "dist"]
    assert get_names(chain(samplers=())) == ["dist"]
    assert set(draw(chain(samplers=("top_k",), top_k=2, temperature=0, seed=1), logits)) == {A, B}
    assert set(draw(chain(samplers=("top_k", "temperature"), top_k=2, temperature=0), logits)) == {A}
    flat = chain(samplers=("temperature", "min_p"), temperature=100, min_p=0.5, seed=1)
    assert len(set(draw(flat, logits))) > 50  # after the temperature no token is below half of the largest


@pytest.mark.native
def test_c15_the_infill_sampler_ends_the_text_if_the_end_is_likely(chain, logits, open_model):
    options = {"samplers": ("top_k", "infill"), "top_k": 3, "seed": 1}
    end = open_model("attention").vocabulary.special_tokens["eot"]
    assert set(draw(chain(**options), logits)) == {A}  # no other has a share of the remaining tokens
    logits[end] = 1.5
    assert set(draw(chain(**options), logits)) == {end}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"samplers": ("top_k", "best")}, "'best', which is not a sampler; the names are penalties, dry"),
        ({"samplers": ("infill", "top_k")}, "must have `top_k` before `infill`"),
        ({"samplers": ("top_k", "infill"), "top_k": 0}, "must be from 1 to 1000"),
    ],
)
def test_c15_samplers_that_cannot_run_are_refused(options, match):
    with pytest.raises(InvalidArgument, match=match):
        Sampling(**options)


@pytest.mark.native
def test_c15_a_clone_continues_from_the_same_state(chain, stack):
    flat = np.zeros(288, dtype=np.float32)
    sampler = chain(**PLAIN, seed=5, presence_penalty=2.0)
    for _ in range(5):
        sampler.accept(sampler.sample(flat))
    clone = stack.enter_context(sampler.clone())
    continued = [sampler.sample(flat) for _ in range(8)]
    assert [clone.sample(flat) for _ in range(8)] == continued


@pytest.mark.native
def test_c15_reset_restores_the_initial_state(chain):
    flat = np.zeros(288, dtype=np.float32)
    sampler = chain(**PLAIN, seed=5, presence_penalty=2.0)
    first = [sampler.sample(flat) for _ in range(6)]
    sampler.accept(first[0])
    sampler.reset()
    assert [sampler.sample(flat) for _ in range(6)] == first


@pytest.mark.native
def test_c15_a_chain_rejects_a_grammar_instead_of_ignoring_it(chain):
    with pytest.raises(UnsupportedOption, match="grammar"):
        chain(grammar='root ::= "a"')


@pytest.mark.native
def test_c15_logits_of_the_wrong_length_are_rejected(chain):
    with pytest.raises(InvalidArgument, match="logits"):
        chain().sample(np.zeros(7, dtype=np.float32))


@pytest.mark.parametrize(("name", "low", "high"), LIMITS)
def test_c15_a_number_out_of_range_is_rejected_by_name(name, low, high):
    for value in (float("nan"), high * 2 + 1, low - 1):
        with pytest.raises(InvalidArgument) as caught:
            Sampling(**{name: value})
        assert caught.value.name == name


@pytest.mark.parametrize("text", ["a\0b", "\ud800", 7])
@pytest.mark.parametrize("name", ["grammar", "dry_sequence_breakers"])
def test_c15_a_text_that_is_no_c_string_is_rejected_by_name(name, text):
    with pytest.raises(InvalidArgument) as caught:
        Sampling(**{name: text if name == "grammar" else ("\n", text)})
    assert caught.value.name == name


@pytest.mark.native
def test_c15_a_bias_for_an_unknown_token_is_rejected(chain):
    with pytest.raises(InvalidArgument, match="token"):
        chain(logit_bias={10**6: 1.0})
