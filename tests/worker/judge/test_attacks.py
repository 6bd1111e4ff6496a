"""The attacks of tests/attacks/ that no probe alone stops, by the commands that they name."""

from __future__ import annotations

import sys

import cheats
import pytest

sys.path.insert(0, str(cheats.ATTACKS))
import run  # noqa: E402

# those of test_probes.py are tried there, kernel by kernel
CHOSEN = {
    name: cheat
    for name, cheat in cheats.ALL.items()
    if name not in cheats.CHEATS and "cpu" in cheat.devices
}


@pytest.fixture(scope="module")
def attacks():
    return {
        name: (run.stopped(CHOSEN[name], records), records)
        for name, records in run.tried(CHOSEN, "cpu")
    }


@pytest.mark.slow  # test_honest.py has a bench of two cheats
@pytest.mark.parametrize("name", CHOSEN)
def test_it_is_stopped(attacks, name):
    right, records = attacks[name]
    assert right, records


def test_every_attack_says_what_it_does_and_what_stops_it():
    assert all(cheat.does and cheat.by for cheat in cheats.ALL.values())
    assert cheats.ALL["control-right"].stopped == ("passed",)


def test_an_attack_that_gets_through_is_seen():
    cheat = cheats.ALL["is-honest-sixty-times"]
    assert not run.stopped(cheat, []) and not run.stopped(cheat, [{"status": "passed"}])
    assert not run.stopped(cheat, [{"status": "wrong", "reason": "something else"}])
    assert run.stopped(cheat, [{"status": "wrong", "reason": cheat.says}])
