"""Where a run finds a data set on its volume."""

from __future__ import annotations

import pytest
from remote.test_remote import Cloud, job, opened, passed, rented

from gdn_cli.catalog import workloads
from gdn_cli.errors import MissingError
from gdn_cli.remote import modal_client, setup
from gdn_cli.worker.request import Options

FILES = dict.fromkeys(
    ["definitions/gdn/d.json", "workloads/gdn/d.jsonl", "blob/a.safetensors"], 9
)
THEIRS = {f"mlsys26-contest/{name}": 9 for name in FILES}


@pytest.mark.parametrize(
    ("there", "needed", "at"),
    [
        (FILES, ["blob/a.safetensors"], ""),
        (THEIRS, ["blob/a.safetensors"], "mlsys26-contest/"),
        (THEIRS | FILES, ["blob/a.safetensors"], ""),
        # the one that has it all
        (
            FILES | THEIRS | {"mlsys26-contest/blob/b": 9},
            ["blob/b"],
            "mlsys26-contest/",
        ),
        ({f"a/b/{name}": 9 for name in FILES}, [], "a/b/"),
    ],
)
def test_a_data_set_is_found_in_a_folder_of_the_volume(there, needed, at):
    assert setup.place("v", there, needed) == at


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({}, "has no data set; `modal volume put flash"),
        ({"definitions/d.json": b""}, "has no data set"),
        (FILES, "is without 1 of 1 files of --dataset, such as blob/w.safetensors"),
    ],
)
def test_a_run_whose_data_is_not_there_costs_nothing(there, says, monkeypatch):
    fake = Cloud([None]).install(monkeypatch)
    has(there, monkeypatch)
    with pytest.raises(MissingError, match=says):
        list(rented()([of_dataset()]))
    assert fake.declared is None and fake.parcels == []


def test_a_run_reads_the_folder_that_has_its_data(monkeypatch):
    wanted = of_dataset()
    fake = Cloud([passed(wanted)]).install(monkeypatch)
    has(THEIRS | {"mlsys26-contest/blob/w.safetensors": 9}, monkeypatch)
    assert [o.status for _, o in rented()([wanted])] == ["done"]
    assert opened(fake.parcels[0]).jobs[0].request.dataset == "/data/mlsys26-contest"


def has(there: dict[str, int], monkeypatch) -> None:
    """The volume has these files."""
    monkeypatch.setattr(modal_client, "files", lambda name: list(there))


def of_dataset():
    base = job("cuda-v4", "cuda", options=Options(dataset="/here"))
    spec = {"type": "safetensors", "path": "blob/w.safetensors", "tensor_key": "q"}
    rows = [
        workloads.replace(w, origin="dataset", inputs={"q": spec})
        for w in base.workloads
    ]
    return base.asking(workloads=tuple(rows))
