"""The attacks of tests/attacks/ that no probe alone stops, by the commands that they name."""

from __future__ import annotations

import sys

import cheats
import pytest

sys.path.insert(0, str(cheats.ATTACKS))
import run  # noqa: E402

pytestmark = pytest.mark.first

# those of test_probes.py are tried there, kernel by kernel
CHOSEN = {
    name: cheat
    for name, cheat in cheats.ALL.items()
    if name not in cheats.CHEATS and "cpu" in cheat.devices
}
QUICK = (
    "control-right", "exchanges-the-timers-code", "forges-records", "is-honest-sixty-times",
    "patches-the-check-and-its-oracle",
)  # fmt: skip
SLOW = tuple(name for name in CHOSEN if name not in QUICK)


def _stopped(names: tuple[str, ...]) -> dict[str, tuple[bool, list[dict]]]:
    chosen = {name: CHOSEN[name] for name in names}
    return {
        name: (run.stopped(chosen[name], records), records)
        for name, records in run.tried(chosen, "cpu")
    }


@pytest.fixture(scope="module")
def quick():
    return _stopped(QUICK)


@pytest.fixture(scope="module")
def slow():
    return _stopped(SLOW)


@pytest.mark.parametrize("name", QUICK)
def test_it_is_stopped(quick, name):
    right, records = quick[name]
    assert right, records


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_others_are_stopped(slow, name):
    right, records = slow[name]
    assert right, records


def test_every_attack_says_what_it_does_and_what_stops_it():
    assert all(cheat.does and cheat.by for cheat in cheats.ALL.values())
    assert cheats.ALL["control-right"].stopped == ("passed",)


def test_an_attack_that_gets_through_is_seen():
    cheat = cheats.ALL["is-honest-sixty-times"]
    assert not run.stopped(cheat, []) and not run.stopped(cheat, [{"status": "passed"}])
    assert not run.stopped(cheat, [{"status": "wrong", "reason": "something else"}])
    assert run.stopped(cheat, [{"status": "wrong", "reason": cheat.says}])
