"""Arithmetic of the benchmarks: from times and counts to measures, bars and the table."""

from __future__ import annotations

import pytest
import results
from measures import BARS, QUICK_TOLERANCE, Bar, Result, quantile, run_alternating, summarize
from workload_runner import Reply, WorkloadRun
from workloads import WORKLOADS, Ask

import agents


def build_reply(
    sent_at: float, *times: float, after: int = 0, computed: int = 10, needed: int = 10, **flags: bool
) -> Reply:
    return Reply(
        Ask(talk="any", says=(), answer=len(times), after=after),
        sent_at,
        chunk_times=list(times),
        ended_at=times[-1],
        computed_tokens=computed,
        needed_tokens=needed,
        **flags,
    )


def test_a_run_is_summarized_by_its_times_and_token_counts():
    replies = [build_reply(0.0, 1.0, 1.5, 3.5, computed=30, needed=20), build_reply(5.0, 5.2)]
    measures = summarize(WorkloadRun(replies=replies, seconds=7.0))
    assert measures["total"] == 7.0
    assert (measures["first_median"], measures["first_p95"]) == (1.0, 1.0)
    assert (measures["gap_median"], measures["gap_largest"]) == (2.0, 2.0)
    assert (measures["computed"], measures["needed"]) == (40, 30)
    assert measures["excess"] == pytest.approx(4 / 3)
    assert "free" not in measures


def test_a_restart_and_a_disconnect_are_measured_by_the_first_token_after_them():
    replies = [
        build_reply(0.0, 9.0),
        build_reply(10.0, 10.25, after_restart=True),
        build_reply(20.0, 20.5, after_disconnect=True),
    ]
    measures = summarize(WorkloadRun(replies=replies))
    assert (measures["first_after_restart"], measures["free"]) == (0.25, 0.5)


def test_disturbed_streams_are_measured_by_their_own_gaps_and_against_undisturbed_streams():
    undisturbed = [build_reply(0.0, 1.0, 2.0), build_reply(0.0, 1.0, 2.0)]
    disturbed = [
        build_reply(10.0, 11.0, 14.0),
        build_reply(10.0, 11.0, 12.0),
        build_reply(10.5, 20.0, 30.0, after=1),
    ]
    measures = summarize(WorkloadRun(replies=[*undisturbed, *disturbed], groups=[undisturbed, disturbed]))
    assert measures["gap_largest"] == 3.0  # not the gap of the late request
    assert (measures["streams"], measures["slowdown"]) == (4.0, 2.0)
    assert measures["first_of_the_long"] == 9.5


def test_an_ideal_cache_saves_the_time_of_the_tokens_that_were_computed_in_vain():
    """Both prefills took 10 ms per token: the first one alone, the others at the same time."""
    first = build_reply(0.0, 2.0, 3.0, computed=200, needed=200)
    together = [build_reply(10.0, 11.0, computed=100, needed=1), build_reply(10.0, 12.0, computed=100, needed=1)]
    short = build_reply(20.0, 20.9, computed=9, needed=9)  # mostly the cost of a decode
    run = WorkloadRun(replies=[first, *together, short], groups=[together], seconds=6.0)
    assert summarize(run)["ideal"] == pytest.approx(6.0 - 198 * 0.01)
    assert summarize(WorkloadRun(replies=[short], seconds=1.0))["ideal"] == 1.0


def test_quantiles_are_measured_values():
    assert quantile([1, 2, 3, 4], 0.95) == 4
    assert quantile(list(range(100)), 0.95) == 95


def build_run(total: float, excess: float = 1.0) -> dict[str, float]:
    return {"total": total, "ideal": 0.8 * total, "excess": excess, "free": total, "computed": 1, "needed": 1}


def test_times_are_judged_by_medians_and_counts_by_the_worst_run():
    result = Result("a", "any", "smollm2")
    result.runs = {
        "afterglow": [build_run(1.0), build_run(9.0, 1.04), build_run(2.0)],
        "llama-server": [build_run(4.0), build_run(2.0), build_run(1.0)],
    }
    excess, total, ideal = result.judge(quick=False)
    assert (excess.value, excess.passed) == (1.04, True)
    assert (total.value, total.passed) == (1.0, True)
    assert (ideal.value, ideal.passed) == (1.25, False)  # the medians are equal: an ideal cache would take 0.8 of them
    assert str(ideal).startswith("total 1.250 of llama-server with an ideal cache, at most 1.05")
    result.runs["afterglow"][0]["excess"] = 1.06
    assert not result.judge(quick=False)[0].passed
    assert not result.judge(quick=True)[0].passed  # counts have no noise


def test_a_quick_run_has_wider_time_bars():
    result = Result("a", "any", "smollm2", runs={"afterglow": [build_run(1.3)], "llama-server": [build_run(1.0)]})
    assert [verdict.passed for verdict in result.judge(quick=False)] == [True, False, False]
    assert [verdict.passed for verdict in result.judge(quick=True)] == [True, True]
    assert QUICK_TOLERANCE == 1.5


def test_measures_that_need_long_prompts_are_judged_in_full_runs_only():
    assert [bar.measure for bars in BARS.values() for bar in bars if bar.full] == [
        "cache_bytes",
        "first_after_restart",
        "gap_largest",
        "streams",
        "total",
    ]
    run = {"excess": 1.0, "first_after_restart": 1.0, "total": 1.0, "ideal": 1.0}
    result = Result("e", "any", "smollm2", runs={"afterglow": [run], "llama-server": [run]})
    assert [verdict.passed for verdict in result.judge(quick=True)] == [True]
    assert [verdict.passed for verdict in result.judge(quick=False)] == [True, False, True]


def test_the_bars_have_the_agreed_limits():
    limits = {letter: [bar.limit for bar in bars] for letter, bars in BARS.items() if bars}
    assert limits == {
        "a": [1.05], "b": [0.6], "c": [0.4], "d": [1.05, 0.4], "e": [0.05], "f": [0.25, 1.3], "g": [1.0], "h": [1.05],
        "k": [0.8], "l": [0.25],
    }  # fmt: skip
    assert BARS.keys() == WORKLOADS.keys()
    assert BARS["g"] == (Bar(measure="free", limit=1.0, ratio=False),)


def test_servers_alternate_in_running_first():
    order = []
    runs = run_alternating(3, ["x", "y"], lambda peer, pair: order.append((pair, peer)) or {"n": pair})
    assert order == [(0, "x"), (0, "y"), (1, "y"), (1, "x"), (2, "x"), (2, "y")]
    assert runs["y"] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_the_table_names_its_conditions_and_replaces_the_text_between_its_comments():
    row = {"workload": "a", "name": "an agent", "model": "smollm2", "pairs": 5}
    row["medians"] = {"afterglow": build_run(1.0), "llama-server": build_run(2.0, 1.5)}
    skipped = {"workload": "j", "name": "a picture", "model": "smollm2", "skipped": "no"}
    table = results.format_table(
        {"rows": [row, skipped], "threads": 2, "processor": "a chip", "date": "2026-01-01", "build": "b1 x"}
    )
    assert "| (a) an agent | SmolLM2 135M (attention) | total | 1.00 | 2.00 | 0.50 | 0.80 | 1.00, 1.50 |" in table
    assert "5 alternating runs, 2 threads, a chip, 2026-01-01, llama.cpp b1" in table
    page = results.replace_table(f"head\n{results.TABLE_BEGIN}\nold\n{results.TABLE_END}\ntail", table)
    assert page.startswith("head\n")
    assert page.endswith("\ntail")
    assert "old" not in page
    with pytest.raises(SystemExit, match="has no"):
        results.replace_table("no comments", table)


def test_every_workload_has_a_main_measure_and_every_model_a_name():
    assert results.MAIN_MEASURES.keys() == WORKLOADS.keys()
    assert agents.MODELS.keys() == results.MODEL_NAMES.keys()
