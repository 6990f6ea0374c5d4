"""What moves bytes beside the program, on devices whose streams run late and out of order, by a seed.

The devices are a stand-in for CUDA (`late_device.cpp`), and run in a process of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from late_client import Late, StandsStill, reason_against, scenario_names
from late_mutations import PLACES, SOURCE, Site, sites
from late_sites import ELSEWHERE, FAILS

from lowtide.native import BuildError

pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against())


@pytest.fixture(scope="module")
def late() -> Iterator[Late]:
    try:
        made = Late()
    except BuildError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("mistake", "fault"),
    [
        ("none", ""),
        ("no wait before a read", "the device too early"),
        ("no wait before a copy out", "the device too early"),
        ("no wait before the program reads", "too early"),
        ("no wait before memory is used again", "too late"),
        ("nothing recorded on the stream that reads", "too late"),
        ("page-locked memory goes too early", "given back before it ran"),
        ("a write to what is being copied", "main memory too early, or too late"),
    ],
)
def test_the_devices_show_each_mistake(late: Late, mistake: str, fault: str) -> None:
    """Of the program that they run; and nothing where there is none."""
    found = late.ask(f"mistake: {mistake}", 0, 60)
    assert fault in found["wrong"] if fault else not found["wrong"] and found["orders"] > 20


SCENARIOS = scenario_names()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_used_before_it_is_ready_nor_after(late: Late, scenario: str) -> None:
    found = late.ask(scenario, 0, 40, seconds=0.25)
    assert not found["wrong"], f"seed {found['seed']}: {found['wrong']}"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nor_in_ten_minutes(late: Late, scenario: str) -> None:
    found = late.ask(scenario, 1000, 1 << 40, seconds=600 / len(SCENARIOS))
    assert not found["wrong"], f"seed {found['seed']}: {found['wrong']}"


@pytest.mark.parametrize("site", sorted(set(FAILS) & set(map(str, sites()))))
def test_no_wait_and_no_event_can_be_taken_away(late: Late, site: str) -> None:
    try:
        found = late.ask(FAILS[site], 0, 60, without=site)
    except StandsStill:
        return
    assert found["wrong"], f"{found['ran']} seeds of {FAILS[site]} do without it: leave it out"


def test_every_wait_has_a_scenario_that_fails_without_it() -> None:
    """A new one is named in late_sites.py."""
    assert sorted({*FAILS, *ELSEWHERE}) == sorted(map(str, sites()))
    assert not set(FAILS) & set(ELSEWHERE)


def test_nothing_else_waits_beside_the_program() -> None:
    """Streams and events are those of `lowtide.accelerator`, wherever bytes move."""
    names = {"wait_event", "wait_stream", "record_stream", "record_event"}
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in names:
                found.add(str(file.relative_to(SOURCE)))
    assert found <= set(PLACES)


def test_a_site_reads_well() -> None:
    assert (
        str(Site("store/lanes.py", "StreamLane.close", "x.wait()", 1))
        == "store/lanes.py: StreamLane.close: x.wait() (2)"
    )
