"""One page of each kind, for those who read them and those who look at them."""

from __future__ import annotations

import json

import pytest
from tests.report import sample

import moeyard as my
from moeyard.report import write_report
from moeyard.report.compare import compare_runs, comparison_page


@pytest.fixture(scope="session")
def all_pages(tmp_path_factory):
    """One of each kind."""
    top = tmp_path_factory.mktemp("pages")
    cluster = sample.cluster()
    traffic = my.workload("zipf:0.9", cluster.num_ranks, mb=1)
    my.simulate(cluster, my.schedule(cluster, traffic, "rails")).save(top / "t.npz")
    (top / "b.json").write_text(json.dumps(sample.bench_data()))
    runs = [sample.a_replay(top / "one"), sample.a_replay(top / "two", 0.5, "last")]
    (top / "c.html").write_text(comparison_page(compare_runs(runs)).html(), encoding="utf-8")
    (top / "a.html").write_text(sample.an_advice().html(), encoding="utf-8")
    (top / "p.html").write_text(sample.a_paper().html(), encoding="utf-8")
    return {
        "advice": top / "a.html",
        "run": write_report(sample.write_run(top / "run", events=[sample.EVENT])),
        "replay": write_report(runs[0]),
        "timeline": write_report(top / "t.npz"),
        "bench": write_report(top / "b.json"),
        "comparison": top / "c.html",
        "paper": top / "p.html",
    }
