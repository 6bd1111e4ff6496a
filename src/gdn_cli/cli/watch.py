"""`gdn watch`: a check and a short comparison after each save."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from .. import errors, units
from . import complete
from . import options as o


@o.grouped
def watch(
    algo: Annotated[
        str, typer.Argument(autocompletion=complete.algos, help="Its name.")
    ],
    place: o.Place,
    workload: o.OneWorkload = None,
    op: o.OpName = None,
    heads: o.Heads = None,
    algos: o.OwnAlgos = None,
    json: o.AsJson = False,
) -> None:
    """Build and check an algo whenever you save it, and compare it with the last one
    that was right.

    A line for each save, at the smallest workload; with --json a line of JSON. Ctrl-C
    ends it, with exit code 0.

    Examples:
      gdn watch my-v1
    """
    from ..catalog import registry
    from ..report import screen
    from ..report import watch as shown
    from ..run import planning
    from ..run import watch as w

    load = partial(registry.load, algos, heads)
    found = load().find(algo, op)
    machine = o.machine()
    here = machine.place(found, place.device)
    if here.mode is None:
        raise errors.MissingError(
            f"{found.full_name} cannot run here: {here.reason}", hint=here.hint
        )
    settings = planning.Settings(
        "check", timeout_s=place.timeout, place=machine.place, machine=machine
    )
    which = planning.Selected([workload] if workload else None)
    attempt = w.Attempts(load, algo, op, which, settings, place.device, screen.say)
    show = screen.show_json_line if json else shown.show_saved
    saves = w.changes(partial(w.contents, found), partial(time.sleep, _EVERY_S))
    if not json:
        screen.put(f"watching {found.own_folder}; Ctrl-C ends it")
    told = []
    try:
        for _ in saves:
            told.append(attempt())
            show(told[-1])
    except KeyboardInterrupt:
        right = sum(saved.status.value == "passed" for saved in told)
        screen.say(f"{units.count(len(told), 'version')} of {algo} seen, {right} right")


_EVERY_S = 0.2  # between two looks at the files
