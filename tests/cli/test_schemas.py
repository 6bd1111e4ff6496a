"""What `--json` prints is what `gdn schema NAME` says: no key more, none less."""

from __future__ import annotations

import json
import shutil

import helpers
import msgspec
import profiles
import pytest

from gdn_cli.cli import schema
from gdn_cli.parsing import to_json

ROOT = helpers.TESTS.parent
FILES = {  # TIMES has no comparisons: a report shows also those fields that are left out
    "RECORDS": ROOT / "results" / "h200" / "decode-compare-rooms.json",
    "TIMES": ROOT / "results" / "h200" / "decode-packed-tp1-peers.json",
}
# name -> its command; FOLDER is an empty one but for what `folder` puts there
COMMANDS = {
    "record": "compare RECORDS RECORDS",
    "summary": "compare RECORDS RECORDS --summary",
    "error": "run nope",
    "new": "new my-v1 --from cpp-v1 --into FOLDER",
    "list": "list --op gdn_mtp --algos FOLDER/own",
    "show": "show cuda-v5",
    "history": "history",
    "history --algo": "history --algo cuda-v5",
    "history --forget": "history --forget decode",
    "report": "report TIMES",
    "report-update": "report --update FOLDER/page.md",
    "profile": "profile v4 --out FOLDER",
    "profile two": "profile v4 fla --out FOLDER",
    "profile-list": "profile --list --out FOLDER",
    "tune": "tune --algo cuda-v5 --dry-run",
    "pack": "pack --algo cpp-v1 -o FOLDER/solution.json",
    "pack hub": "pack --op gdn_decode --algo cpp-v1 --for hub -o FOLDER/hub",
    "data-list": "data list --op gdn_decode",
    "doctor": "doctor",
    "commands": "commands",
}
ELSEWHERE = {  # name -> the test that validates it
    "progress": "test_text.py",
    "watch": "run/test_watch.py",
    "algo": "what read_algo reads",
    "build": "library/test_distribution.py",
    "reply": "what the command reads from a worker",
    "data-build": "test_a_data_set",
    "run bench compare floors": "record",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schemas")
    (folder / "runs").mkdir()
    records = FILES["RECORDS"]
    shutil.copy(records, folder / "runs" / "decode.json")
    block = f"<!-- gdn report {records} --part compare -->\n<!-- /gdn report -->\n"
    (folder / "page.md").write_text(block)
    helpers.write_algo(folder / "own", "broken", "", op="gdn_mtp", drop=("language",))
    for name, document in (("v4", profiles.v4()), ("fla", profiles.fla())):
        (folder / name).mkdir()
        (folder / name / "profile.json").write_text(json.dumps(document))
    return folder


def validate(name, document):
    """Raise for a field that its schema has not, or that has another type."""
    form = schema.forms()[name]
    assert to_json(msgspec.convert(document, form)) == document


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.sampled(5)
def test_a_command_prints_what_its_schema_says(name, folder, gdn):
    words = COMMANDS[name].replace("FOLDER", str(folder)).split()
    args = [FILES.get(word, word) for word in words]
    done = gdn(*args, "--json", env={"GDN_HOME": str(folder)})
    validate(name.split()[0], done.json)
    assert done.code in (0, 2 if name == "error" else 0, 3 if name == "doctor" else 0)


def test_a_data_set(tmp_path, gdn):
    pytest.importorskip("torch")
    args = "--op", "gdn_decode", "-n", "1", "--algo", "cpp-v1"
    validate("data-build", gdn("data", "build", tmp_path, *args, "--json").json)


def test_every_schema_is_printed_and_validated(gdn):
    listed = gdn("schema", "--list").out
    names = [line.split()[0] for line in listed.splitlines()]
    assert names == list(schema.forms())
    tested = " ".join([*COMMANDS, *ELSEWHERE]).split()
    assert set(names) <= set(tested)
    for name in names:
        assert "$defs" in gdn("schema", name).json or name == "algo"


def test_commands_name_their_schema(gdn):
    every = gdn("commands", "--json").json["commands"]
    of = {each["name"]: each["schema"] for each in every}
    assert (of["bench"], of["data list"], of["modal tune"]) == (
        "bench",
        "data-list",
        "tune",
    )
    with_json = {
        c["name"] for c in every for p in c["parameters"] if "--json" in p["names"]
    }
    assert {name for name in with_json if of[name] is None} == set()
