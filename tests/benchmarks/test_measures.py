"""The arithmetic of the benchmarks: from times and counts to bars."""

from __future__ import annotations

import agents
import pytest
import results
from measures import BARS, QUICK, Bar, Result, alternating, quantile, summary
from playing import Played, Reply
from workloads import WORKLOADS, Ask


def reply(asked: float, *times: float, after: int = 0, computed: int = 10, needed: int = 10, **more: bool) -> Reply:
    ask = Ask(talk="any", says=(), answer=len(times), after=after)
    made = Reply(ask, asked, times=list(times), ended=times[-1], computed=computed, needed=needed)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_run_in_numbers():
    played = Played(replies=[reply(0.0, 1.0, 1.5, 3.5, computed=30, needed=20), reply(5.0, 5.2)], seconds=7.0)
    numbers = summary(played)
    assert numbers["total"] == 7.0
    assert (numbers["first_median"], numbers["first_p95"]) == (1.0, 1.0)
    assert (numbers["gap_median"], numbers["gap_largest"]) == (2.0, 2.0)
    assert (numbers["computed"], numbers["needed"]) == (40, 30)
    assert numbers["excess"] == pytest.approx(4 / 3)
    assert "free" not in numbers


def test_a_restart_and_a_disconnect_are_judged_by_the_first_token_after_them():
    played = Played(replies=[reply(0.0, 9.0), reply(10.0, 10.25, restarted=True), reply(20.0, 20.5, freed=True)])
    numbers = summary(played)
    assert (numbers["first_after_restart"], numbers["free"]) == (0.25, 0.5)


def test_streams_in_company_are_judged_by_their_own_gaps_and_against_themselves_alone():
    alone = [reply(0.0, 1.0, 2.0), reply(0.0, 1.0, 2.0)]
    company = [reply(10.0, 11.0, 14.0), reply(10.0, 11.0, 12.0), reply(10.5, 20.0, 30.0, after=1)]
    numbers = summary(Played(replies=[*alone, *company], groups=[alone, company]))
    assert numbers["gap_largest"] == 3.0  # not that of the one that came later
    assert (numbers["streams"], numbers["slowdown"]) == (4.0, 2.0)
    assert numbers["first_of_the_long"] == 9.5


def test_quantiles_are_values_that_were_measured():
    assert quantile([1, 2, 3, 4], 0.95) == 4
    assert quantile(list(range(100)), 0.95) == 95


def run(total: float, excess: float = 1.0) -> dict[str, float]:
    return {"total": total, "excess": excess, "free": total, "computed": 1, "needed": 1}


def test_times_are_compared_by_medians_and_counts_by_the_worst_run():
    result = Result("a", "any", "smollm2")
    result.runs = {"afterglow": [run(1.0), run(9.0, 1.04), run(2.0)], "llama-server": [run(4.0), run(2.0), run(1.0)]}
    excess, total = result.judged(quick=False)
    assert (excess.value, excess.passed) == (1.04, True)
    assert (total.value, total.passed) == (1.0, True)
    result.runs["afterglow"][0]["excess"] = 1.06
    assert not result.judged(quick=False)[0].passed
    assert not result.judged(quick=True)[0].passed  # counts have no noise


def test_a_quick_run_is_held_to_wider_bars_in_time():
    result = Result("a", "any", "smollm2", runs={"afterglow": [run(1.3)], "llama-server": [run(1.0)]})
    assert [one.passed for one in result.judged(quick=False)] == [True, False]
    assert [one.passed for one in result.judged(quick=True)] == [True, True]
    assert QUICK == 1.5


def test_what_needs_long_prompts_is_judged_in_full_runs_only():
    assert [bar.measure for bars in BARS.values() for bar in bars if bar.full] == [
        "cache_bytes",
        "first_after_restart",
        "gap_largest",
        "streams",
    ]
    run = {"excess": 1.0, "first_after_restart": 1.0}
    result = Result("e", "any", "smollm2", runs={"afterglow": [run], "llama-server": [run]})
    assert [one.passed for one in result.judged(quick=True)] == [True]
    assert [one.passed for one in result.judged(quick=False)] == [True, False]


def test_the_bars_are_those_of_the_issue():
    limits = {letter: [bar.limit for bar in bars] for letter, bars in BARS.items() if bars}
    assert limits == {
        "a": [1.05], "b": [0.6], "c": [0.4], "d": [1.05, 0.4], "e": [0.05], "f": [0.25, 1.3], "g": [1.0], "h": [1.05],
    }  # fmt: skip
    assert BARS.keys() == WORKLOADS.keys()
    assert BARS["g"] == (Bar(measure="free", limit=1.0, ratio=False),)


def test_servers_take_turns_at_being_first():
    order = []
    runs = alternating(3, ["x", "y"], lambda peer, pair: order.append((pair, peer)) or {"n": pair})
    assert order == [(0, "x"), (0, "y"), (1, "y"), (1, "x"), (2, "x"), (2, "y")]
    assert runs["y"] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_the_table_stands_between_its_marks_and_names_the_conditions():
    row = {"workload": "a", "name": "an agent", "model": "smollm2", "pairs": 5}
    row["medians"] = {"afterglow": run(1.0), "llama-server": run(2.0, 1.5)}
    skipped = {"workload": "j", "name": "a picture", "model": "smollm2", "skipped": "no"}
    table = results.table(
        {"rows": [row, skipped], "threads": 2, "processor": "a chip", "date": "2026-01-01", "build": "b1 x"}
    )
    assert "| (a) an agent | SmolLM2 135M (attention) | all of it | 1.00 | 2.00 | 0.50 | 1.00, 1.50 |" in table
    assert "5 alternating runs, 2 threads, a chip, 2026-01-01, llama.cpp b1" in table
    page = results.between(f"head\n{results.BEGIN}\nold\n{results.END}\ntail", table)
    assert page.startswith("head\n")
    assert page.endswith("\ntail")
    assert "old" not in page
    with pytest.raises(SystemExit, match="has no"):
        results.between("no marks", table)


def test_every_workload_has_something_to_be_shown_by():
    assert results.SHOWN.keys() == WORKLOADS.keys()
    assert agents.MODELS.keys() == results.NAMES.keys()
