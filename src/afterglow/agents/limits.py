"""Limits of a run, what it has spent, and the share of a child."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from afterglow.errors import InvalidArgument

SHARED_AMONG_CHILDREN = ("computed", "generated", "calls")  # the others are the same for runs that go on side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a run. None is no limit. A run that reaches one ends with a last answer and the reason.

    >>> Limits(rounds=30, generated=20_000).calls
    100
    """

    rounds: int | None = 30  # responses of the model, before the last answer
    computed: int | None = None  # prompt tokens that were not cached
    generated: int | None = None  # tokens, before the last answer
    seconds: float | None = None  # of generation and of tools; waiting for a person does not count
    calls: int | None = 100  # tool calls that were executed
    repeats: int | None = 3  # identical calls
    depth: int | None = 3  # generations of children below the first run

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind, text = (int | float, "a number") if field.name == "seconds" else (int, "an integer")
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or not value >= 0):
                raise InvalidArgument(f"limits.{field.name}", f"must be {text} of at least 0 or None, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run has spent, its children included.

    >>> Spent(rounds=1, generated=20).add(Spent(rounds=1, generated=5)).generated
    25
    """

    rounds: int = 0
    computed: int = 0
    generated: int = 0
    seconds: float = 0.0
    calls: int = 0

    def add(self, other: Spent) -> Spent:
        """Return the sum."""
        return Spent(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(Spent)})


DEFAULT_LIMITS = Limits()
NOTHING_SPENT = Spent()


def find_reached_limit(limits: Limits, spent: Spent) -> str | None:
    """Return the first limit that is reached, with its number; None if there is none.

    >>> find_reached_limit(Limits(rounds=2), Spent(rounds=2))
    'the limit of 2 rounds is reached'
    """
    for field in fields(Spent):
        limit = getattr(limits, field.name)
        if limit is not None and getattr(spent, field.name) >= limit:
            return f"the limit of {limit:,.15g} {field.name} is reached"
    return None


def find_remaining(limits: Limits, spent: Spent) -> Limits:
    """Return the limits of what a run may still spend.

    >>> find_remaining(Limits(rounds=5, calls=None), Spent(rounds=2)).rounds
    3
    """
    rest = {
        field.name: max(0, limit - getattr(spent, field.name))
        for field in fields(Spent)
        if (limit := getattr(limits, field.name)) is not None
    }
    return replace(limits, **rest)


def share_limits(parent: Limits, spent: Spent, children: int, wanted: Limits | None = None) -> Limits:
    """Return the limits of each of some children. Together they cannot spend more than the parent has left.

    >>> share_limits(Limits(generated=1000), Spent(generated=200), 4, Limits(rounds=5)).generated
    200
    >>> share_limits(Limits(rounds=30), Spent(), 4, Limits(rounds=50)).rounds
    30
    """
    remaining = find_remaining(parent, spent)
    shares = {
        name: value // children for name in SHARED_AMONG_CHILDREN if (value := getattr(remaining, name)) is not None
    }
    available = replace(remaining, depth=None if parent.depth is None else max(0, parent.depth - 1), **shares)
    if wanted is None:
        return available

    def narrow(name: str) -> float | None:
        return min(
            (value for value in (getattr(available, name), getattr(wanted, name)) if value is not None), default=None
        )

    return Limits(**{field.name: narrow(field.name) for field in fields(Limits)})  # type: ignore[arg-type]
