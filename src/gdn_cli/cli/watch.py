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
    subject = load().find(algo, op)
    machine = o.machine()
    target = machine.place(subject, place.device)
    if target.mode is None:
        raise errors.MissingError(
            f"{subject.full_name} cannot run here: {target.reason}", hint=target.hint
        )
    settings = planning.Settings(
        "check", timeout_s=place.timeout, place=machine.place, machine=machine
    )
    which = planning.Selected([workload] if workload else None)
    attempt = w.Attempts(load, algo, op, which, settings, place.device, screen.say)
    show = screen.show_json_line if json else shown.show_saved
    saves = w.changes(partial(w.contents, subject), partial(time.sleep, _EVERY_S))
    if not json:
        screen.put(f"watching {subject.own_folder}; Ctrl-C ends it")
    results = []
    try:
        for _ in saves:
            results.append(attempt())
            show(results[-1])
    except KeyboardInterrupt:
        right = sum(saved.status.value == "passed" for saved in results)
        screen.say(
            f"{units.count(len(results), 'version')} of {algo} seen, {right} right"
        )


_EVERY_S = 0.2  # between two looks at the files
