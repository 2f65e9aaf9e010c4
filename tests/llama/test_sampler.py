"""C15: the sampler chain: one documented order, every option has an effect, temperature 0 is argmax."""

from __future__ import annotations

import math

import numpy as np
import pytest

from afterglow.errors import InvalidArgument, InvalidGrammar
from afterglow.llama.library.loader import get_library
from afterglow.llama.sampler import SamplerChain
from afterglow.llama.sampling import LIMITS, Sampling

PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
A, B, C = 70, 71, 72


@pytest.fixture
def chain(open_model, stack):
    """Make a chain on the tiny model."""
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
    """How often each token comes out, of `count` draws."""
    drawn = [chain.sample(logits) for _ in range(count)]
    return {token: drawn.count(token) / count for token in set(drawn)}


def test_c15_temperature_zero_is_argmax_even_where_the_margin_is_tiny(chain):
    """Trap 1: with the temperature stage skipped it would be a random draw."""
    noise = np.random.default_rng(0).normal(size=288).astype(np.float32)
    for seed in range(50):
        assert chain(temperature=0, seed=seed).sample(noise) == int(noise.argmax())


def test_c15_temperature_zero_still_obeys_bias_and_penalties(chain, logits):
    assert chain(temperature=0, logit_bias={A: -50.0}).sample(logits) == B
    repeating = chain(temperature=0, presence_penalty=5.0, repeat_last_n=64)
    repeating.accept(A)
    assert repeating.sample(logits) == B


def test_c15_a_draw_follows_the_softmax(chain, logits):
    shares = draw(chain(**PLAIN, seed=1), logits, 4000)
    weights = {token: math.exp(logit) for token, logit in ((A, 3), (B, 2), (C, 1))}
    for token, weight in weights.items():
        assert shares[token] == pytest.approx(weight / sum(weights.values()), abs=0.03)


def test_c15_a_seed_decides_every_draw_and_none_means_random(chain, logits):
    flat = np.zeros_like(logits)

    def sequence(**options):
        made = chain(**PLAIN, **options)
        return [made.sample(flat) for _ in range(12)]

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


@pytest.mark.parametrize("name", EFFECTS)
def test_c15_each_option_has_the_effect_it_is_named_for(chain, logits, name):
    options, allowed = EFFECTS[name]
    assert set(draw(chain(**PLAIN, seed=3), logits)) >= {A, B, C}
    made = chain(**{**PLAIN, **options}, seed=3)
    if name.startswith("mirostat"):  # it learns its cut from what it accepts
        for _ in range(30):
            made.accept(made.sample(logits))
    assert set(draw(made, logits, 100)) <= allowed


@pytest.mark.parametrize("options", [{"penalty_repeat": 9.0}, {"penalty_frequency": 9.0}, {"penalty_presence": 9.0}])
def test_c15_penalties_push_away_what_was_accepted(chain, logits, options):
    made = chain(**PLAIN, seed=1, **options)
    assert A in draw(made, logits)
    made.accept(A)
    assert draw(made, logits).get(A, 0) < 0.2


def test_c15_dry_stops_a_phrase_from_being_said_again(chain, logits):
    made = chain(**PLAIN, seed=1, dry_multiplier=50.0, dry_allowed_length=2)
    for token in (80, 81, 82, A, 90, 80, 81, 82):
        made.accept(token)
    assert A not in draw(made, logits)
    allowed = chain(**PLAIN, seed=1, dry_multiplier=50.0, dry_allowed_length=9)
    for token in (80, 81, 82, A, 90, 80, 81, 82):
        allowed.accept(token)
    assert A in draw(allowed, logits)


PHRASE = (80, 81, 82, A, 90, 80, 81, 82)


def said(chain: SamplerChain) -> SamplerChain:
    for token in PHRASE:
        chain.accept(token)
    return chain


def test_c15_dry_grows_with_its_base_and_ends_at_its_reach_and_at_its_breakers(chain, logits):
    gentle = said(chain(**PLAIN, seed=1, dry_multiplier=0.1, dry_base=1.0, dry_allowed_length=1))
    steep = said(chain(**PLAIN, seed=1, dry_multiplier=0.1, dry_base=10.0, dry_allowed_length=1))
    assert draw(gentle, logits)[A] > 0.4
    assert A not in draw(steep, logits)
    short = said(chain(**PLAIN, seed=1, dry_multiplier=50.0, dry_allowed_length=2, dry_penalty_last_n=4))
    assert A in draw(short, logits)
    piece = short.model.vocabulary.token_to_piece(82).decode()
    broken = said(chain(**PLAIN, seed=1, dry_multiplier=50.0, dry_allowed_length=2, dry_sequence_breakers=(piece,)))
    assert A in draw(broken, logits)


def test_c15_the_exponent_bends_the_dynamic_temperature(chain, logits):
    options = {**PLAIN, "temperature": 2.0, "dynamic_range": 2.0, "seed": 1}
    flat = draw(chain(**options, dynatemp_exponent=0.1), logits)
    sharp = draw(chain(**options, dynatemp_exponent=3.0), logits)
    assert sharp[A] > flat[A] + 0.05


def test_c15_dynamic_temperature_sharpens_a_sure_row_more_than_a_flat_one(chain, logits):
    sure = draw(chain(**{**PLAIN, "temperature": 2.0}, dynatemp_range=2.0, seed=1), logits)
    plain = draw(chain(**{**PLAIN, "temperature": 2.0}, seed=1), logits)
    assert sure[A] > plain[A] + 0.1


def test_c15_the_order_is_the_documented_one(chain):
    made = chain(
        temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, typical_p=0.9, top_n_sigma=2, xtc_probability=0.5,
        repeat_penalty=1.1, dry_multiplier=1, logit_bias={A: 1.0}, dynatemp_range=0.1,
    )  # fmt: skip
    symbols, text = get_library().symbols, get_library().decode_string
    links = [
        symbols.llama_sampler_chain_get(made.pointer, i) for i in range(symbols.llama_sampler_chain_n(made.pointer))
    ]
    names = [text(symbols.llama_sampler_name(link)).lstrip("+?") for link in links]
    assert names == [
        "logit-bias", "penalties", "dry", "top-n-sigma", "top-k", "typical", "top-p", "min-p", "xtc", "temp-ext",
        "dist",
    ]  # fmt: skip


def test_c15_a_clone_goes_its_own_way_from_the_same_state(chain, stack):
    flat = np.zeros(288, dtype=np.float32)
    made = chain(**PLAIN, seed=5, presence_penalty=2.0)
    for _ in range(5):
        made.accept(made.sample(flat))
    twin = stack.enter_context(made.clone())
    continued = [made.sample(flat) for _ in range(8)]
    assert [twin.sample(flat) for _ in range(8)] == continued


def test_c15_reset_starts_over(chain):
    flat = np.zeros(288, dtype=np.float32)
    made = chain(**PLAIN, seed=5, presence_penalty=2.0)
    first = [made.sample(flat) for _ in range(6)]
    made.accept(first[0])
    made.reset()
    assert [made.sample(flat) for _ in range(6)] == first


def test_c15_a_grammar_lets_only_its_words_through(chain, open_model):
    vocabulary = open_model("attention").vocabulary
    made = chain(temperature=1.0, seed=2, grammar='root ::= "cat" | "car"')
    rng = np.random.default_rng(0)
    text = b""
    for _ in range(10):
        token = made.sample(rng.normal(size=vocabulary.size).astype(np.float32))
        made.accept(token)
        if token in vocabulary.eog_tokens:
            break
        text += vocabulary.token_to_piece(token)
    assert text in (b"cat", b"car")


def test_c15_a_grammar_holds_at_temperature_zero_too(chain, logits):
    """Trap 8: grammar only on one path."""
    digits = chain(temperature=0, grammar="root ::= [0-9]+").sample(logits)
    assert chain(grammar="root ::= [0-9]+").is_allowed(digits)


def test_c15_a_token_the_grammar_forbids_is_an_error_and_not_an_abort(chain, open_model):
    vocabulary = open_model("attention").vocabulary
    (forbidden,) = vocabulary.tokenize("x")
    made = chain(grammar='root ::= "a"')
    with pytest.raises(InvalidArgument, match="not allowed by the grammar"):
        made.accept(forbidden)
    (allowed,) = vocabulary.tokenize("a")
    made.accept(allowed)


def test_c15_a_grammar_s_end_accepted_once_more_is_an_error_and_not_an_abort(chain, open_model, logits):
    vocabulary = open_model("attention").vocabulary
    made = chain(grammar='root ::= "a"')
    made.accept(*vocabulary.tokenize("a"))
    made.accept(vocabulary.special_tokens["eos"])
    with pytest.raises(InvalidArgument, match="end"):
        made.accept(vocabulary.special_tokens["eos"])
    with pytest.raises(InvalidArgument, match="ended"):
        made.sample(logits)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= (",
        "nonsense",
        "root ::= undefined",
        "root ::= root",
        'other ::= "a"',
        "(" * 5000,
        "root ::= " + "(" * 500,
    ],
)
def test_c15_a_broken_grammar_is_refused_when_the_chain_is_made(chain, grammar):
    with pytest.raises(InvalidGrammar):
        chain(grammar=grammar)


def test_c15_a_row_of_another_length_is_refused(chain):
    with pytest.raises(InvalidArgument, match="logits"):
        chain().sample(np.zeros(7, dtype=np.float32))


@pytest.mark.parametrize(("name", "low", "high"), LIMITS)
def test_c15_a_number_out_of_range_is_refused_by_name(name, low, high):
    for value in (float("nan"), high * 2 + 1, low - 1):
        with pytest.raises(InvalidArgument) as caught:
            Sampling(**{name: value})
        assert caught.value.name == name


def test_c15_a_bias_for_a_token_that_does_not_exist_is_refused(chain):
    with pytest.raises(InvalidArgument, match="token"):
        chain(logit_bias={10**6: 1.0})
