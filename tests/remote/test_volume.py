"""The data set's volume: what `gdn modal setup` writes over, and where a run finds a
data set on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from remote.test_remote import SETTINGS, Cloud, job, opened, passed, rented

from gdn_cli.catalog import workloads
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.remote import modal_client, setup
from gdn_cli.remote.setup import DATASET, TWINS
from gdn_cli.worker.request import Options

FILES = {
    "definitions/gdn/d.json": b"{}",
    "workloads/gdn/d.jsonl": b"{}",
    "blob/a.safetensors": b"\0" * 9,
}


class Volume:
    """A volume in memory, and what was done to it."""

    def __init__(self, files: dict[str, bytes], monkeypatch) -> None:
        self.content, self.done = dict(files), []
        monkeypatch.setattr(modal_client, "connect", lambda seconds: None)
        mine = SETTINGS.volumes.dataset
        monkeypatch.setattr(
            modal_client, "Volume", lambda name: self if name == mine else None
        )

    def files(self):
        return {name: len(data) for name, data in self.content.items()}

    def upload(self, files):
        self.done += files
        self.content |= {
            n: f.read_bytes() if isinstance(f, Path) else f.read()
            for n, f in files.items()
        }

    def remove(self, name):
        del self.content[name]


def folder(root: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def stocked(tmp_path, dataset: bool, force: bool = False) -> setup.Stocked:
    mine = folder(tmp_path)
    return setup.setup(
        SETTINGS, mine if dataset else None, lambda: mine, lambda line: None, force
    )


THEIRS = {f"mlsys26-contest/{name}": b"theirs!!!" for name in FILES}


@pytest.mark.parametrize(
    ("there", "dataset", "says"),
    [
        (FILES, False, r"did not put there \(blob, definitions, workloads\)"),
        (THEIRS, False, r"did not put there \(mlsys26-contest\)"),
        ({"notes.txt": b"hello"}, True, r"did not put there \(notes.txt\)"),
        (FILES | {DATASET: b"{}"}, False, "was uploaded with --dataset"),
        (FILES | {TWINS: b"{}"}, True, "has the twins"),
    ],
)
def test_what_somebody_else_put_there_is_not_written_over(
    there, dataset, says, tmp_path, monkeypatch
):
    volume = Volume(there, monkeypatch)
    with pytest.raises(UsageError, match=says) as caught:
        stocked(tmp_path, dataset)
    assert "nothing was changed" in caught.value.hint
    assert volume.content == there and volume.done == []
    # a tensor of equal size is another one: all are uploaded
    forced = stocked(tmp_path, dataset, force=True)
    assert (forced.uploaded, forced.kept) == (3, 0)
    assert FILES.items() <= volume.content.items()
    assert {DATASET, TWINS} & set(volume.content) == {DATASET if dataset else TWINS}


@pytest.mark.parametrize("dataset", [True, False])
def test_the_mark_comes_first_and_lets_the_upload_be_repeated(
    dataset, tmp_path, monkeypatch
):
    volume = Volume({}, monkeypatch)
    assert stocked(tmp_path, dataset).uploaded == 3
    assert (
        volume.done[0] == (DATASET if dataset else TWINS)
        and volume.done[-1] == "workloads/gdn/d.jsonl"
    )
    again = stocked(tmp_path, dataset)
    assert (again.uploaded, again.kept) == (2, 1)  # texts always


def test_without_data_any_volume_will_do(monkeypatch):
    volume = Volume(THEIRS, monkeypatch)
    setup.setup(SETTINGS, None, None, lambda line: None)
    assert volume.done == []


@pytest.mark.parametrize(
    ("there", "needed", "at"),
    [
        (FILES, ["blob/a.safetensors"], ""),
        (THEIRS, ["blob/a.safetensors"], "mlsys26-contest/"),
        (THEIRS | FILES, ["blob/a.safetensors"], ""),
        # the one that has it all
        (
            FILES | THEIRS | {"mlsys26-contest/blob/b": b""},
            ["blob/b"],
            "mlsys26-contest/",
        ),
        ({f"a/b/{name}": b"" for name in FILES}, [], "a/b/"),
    ],
)
def test_a_data_set_is_found_in_a_folder_of_the_volume(there, needed, at):
    assert setup.place("v", there, needed) == at


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({}, "has no data set; `gdn modal setup --dataset DIR` uploads one"),
        ({"definitions/d.json": b""}, "has no data set"),
        (FILES, "is without 1 of 1 files of --dataset, such as blob/w.safetensors"),
    ],
)
def test_a_run_whose_data_is_not_there_costs_nothing(there, says, monkeypatch):
    fake = Cloud([None]).install(monkeypatch)
    Volume(there, monkeypatch)
    with pytest.raises(MissingError, match=says):
        list(rented()([of_dataset()]))
    assert fake.declared is None and fake.parcels == []


def test_a_run_reads_the_folder_that_has_its_data(monkeypatch):
    wanted = of_dataset()
    fake = Cloud([passed(wanted)]).install(monkeypatch)
    Volume(THEIRS | {"mlsys26-contest/blob/w.safetensors": b""}, monkeypatch)
    assert [o.status for _, o in rented()([wanted])] == ["done"]
    assert opened(fake.parcels[0]).jobs[0].request.dataset == "/data/mlsys26-contest"


def of_dataset():
    base = job("cuda-v4", "cuda", options=Options(dataset="/here"))
    spec = {"type": "safetensors", "path": "blob/w.safetensors", "tensor_key": "q"}
    rows = [
        workloads.replace(w, origin="dataset", inputs={"q": spec})
        for w in base.workloads
    ]
    return base.asking(workloads=tuple(rows))
