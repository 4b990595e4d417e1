"""The report as text and as JSON."""

import dataclasses
import json

import moe_xla


def report(*sites, semantics="dropless"):
    return moe_xla.Report("train_step", semantics, sites)


def test_program_without_a_site_says_so():
    assert str(report()) == "train_step: no Mixture-of-Experts layer found; the program is unchanged"


def test_table_has_one_row_for_each_site_and_a_line_for_each_refusal(rewritten_site, kept_site):
    title, headers, first, second, *below = str(report(rewritten_site, kept_site)).splitlines()
    assert title == "train_step: 2 Mixture-of-Experts layers, dropless asked for"
    assert first.split("  ") != [] and headers.index("status") == first.index("rewritten") == second.index("kept")
    for cell in (
        "einsum_dispatch",
        "4096",
        "320",
        "rank >= 320",
        "blocked",
        "51.500",
        "310.200",
        "1342.000",
        "model.py:41",
    ):
        assert cell in first
    assert below == [
        "site 2 from model.py:41 (moe) was kept: slots are not proven unique (sort at model.py:38 (route))"
    ]


def test_degraded_site_is_explained(rewritten_site):
    degraded = dataclasses.replace(rewritten_site, semantics="exact", reason="the capacity is read by a metric")
    assert report(degraded).unmet() == (
        "site 1 from model.py:41 (moe) was rewritten as exact: the capacity is read by a metric",
    )
    assert report(degraded, semantics="exact").unmet() == ()


def test_unmet_site_without_details_still_has_a_line():
    assert report(moe_xla.Site("padded", "einsum_dispatch")).unmet() == ("site 1 was padded: no reason given",)


def test_json_holds_every_field(rewritten_site, kept_site):
    data = json.loads(report(rewritten_site, kept_site).to_json())
    assert data["function"] == "train_step" and data["semantics"] == "dropless"
    assert data["sites"] == [dataclasses.asdict(rewritten_site), dataclasses.asdict(kept_site)]
