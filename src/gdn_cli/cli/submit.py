"""`gdn submit`: check a team's repository, and write an algo into it as the contest reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .. import errors
from . import options as o


@o.grouped
def submit(
    repository: Annotated[Path, typer.Argument(metavar="REPOSITORY", help="A clone of your team's repository.")],
    algos: o.OneAlgo,
    name: Annotated[
        Optional[str], typer.Option("--name", metavar="NAME", show_default="<op>-<algo>", help="The solution's name.")
    ] = None,
    author: Annotated[Optional[str], typer.Option("--author", metavar="NAME", help="Your team.")] = None,
    tag: Annotated[
        Optional[str], typer.Option("--tag", metavar="TAG", show_default="<op>-v<number>", help="The tag to set.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="The most seconds that the proof may take.")
    ] = 300.0,
    json: o.AsJson = False,
) -> None:
    """Check a contest repository. With --algo: pack and prove it, write it there, commit and tag. Pushes nothing."""
    import tempfile

    import msgspec

    from .. import files
    from ..catalog import pack, submission
    from ..report import screen, terminal
    from ..run import prove, submit

    known, root = algos.known(), submit.repository(repository)
    there = submission.entries(root, known)
    if not algos.algo:
        faults = sum(len(entry.faults) for entry in there)
        if json:
            screen.show_json({"entries": msgspec.to_builtins(there)})
        else:
            terminal.show_submission(there)
        raise typer.Exit(errors.FAILED if faults or not there else errors.OK)
    found = known.find(algos.one("submit"), algos.op)
    if not author:
        raise errors.UsageError("whose is it?", hint="--author NAME: your team, as it is registered")
    if found.setup:
        raise errors.UsageError(f"{found.full_name} does work that is not timed ({found.setup})")
    op = known.ops[found.op]
    solution = pack.pack(found, op, name=name, author=author)
    steps: list[dict[str, str]] = []

    def proved() -> None:
        with tempfile.TemporaryDirectory(prefix="gdn-submit-") as folder:
            file = Path(folder) / "solution.json"
            files.write(file, msgspec.json.encode(solution))
            steps.extend(prove.prove(file, found.packages, known, timeout, o.machine()))
        if not json:
            terminal.show_proof(steps)
        bad = [step for step in steps if step["state"] == "failed"]
        unbuilt = [step for step in steps if (step["step"], step["state"]) == ("build", "skipped")]
        if bad or unbuilt:
            code = errors.FAILED if bad else errors.MISSING
            why = (bad or unbuilt)[0]["detail"].splitlines()[0]
            raise errors.GdnError(f"not submitted, because it could not be proved: {why}", code=code)

    done = submit.submit(root, solution, op.name, tag, known, proved)
    if json:
        screen.show_json(msgspec.to_builtins(done) | {"proof": steps})
    else:
        what = f"commit {done.commit}" if done.commit else "nothing had to be changed"
        screen.put(
            f"{repository / done.folder}: {solution['name']} for {solution['definition']}, {what}, tag {done.tag}"
        )
        screen.put(f"to hand it in: {done.push}")
