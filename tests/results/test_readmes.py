"""Tables and figures of README and docs against the records and the formulas that they
are made from; their links.
"""

from __future__ import annotations

import math
import re
import shutil

import helpers
import pytest

from gdn_cli.records import store
from gdn_cli.units import duration, three
from gdn_cli.worker.timing import floor

ROOT = helpers.TESTS.parent
REGISTRY = helpers.REGISTRY
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "algos").glob("*/README.md"),
    ]
)
# Written by `make docs`, or by a branch that this one does not wait for.
MADE = {"CHANGELOG.md", "CONTRIBUTING.md", "docs/cli.md", "docs/records.md"}
H200 = ROOT / "results" / "h200"

FI, FLA = "fi-baseline", "fla-upstream"
READY = ("fi-ready", "fi-ready-cp", "flashqla-ready")
# README's row for each op: the record with the time at a size, the one with the peers, and those.
PACKED = ("vllm-packed", "sglang-packed", "fi-pool", "attn-gym")
ROWS = [
    (
        "gdn_decode",
        "decode-sweep",
        "cuda-v5",
        {"batch_size": 64},
        "decode-sweep",
        (FI, FLA),
    ),
    (
        "gdn_decode",
        "decode-in-place",
        "cuda-v5",
        {"batch_size": 64},
        "decode-in-place",
        (FI,),
    ),
    (
        "gdn_decode_bf16",
        "decode-bf16-in-place",
        "cuda-v5-bf16",
        {"batch_size": 64},
        "decode-bf16-in-place",
        (FI,),
    ),
    (
        "gdn_prefill",
        "prefill-peers",
        "cuda-chunk",
        {"total_seq_len": 8192, "num_seqs": 1},
        "prefill-peers",
        READY,
    ),
    *(
        (op, f"{name}-peers", algo, {"batch_size": 64}, f"{name}-peers", peers)
        for op, name, algo, peers in (
            ("gdn_decode_packed", "decode-packed", "cuda-v5-packed", PACKED),
            ("gdn_decode_packed", "decode-packed-tp1", "cuda-v5-packed", PACKED),
            ("gdn_layer", "layer", "cuda-v1", ("vllm-chain",)),
            ("gdn_mtp", "mtp", "cuda-v1", ("fi-mtp",)),
            ("gdn_mtp_packed", "mtp-packed", "cuda-v1", ("fi-mtp", "vllm-mtp")),
        )
    ),
]


def times(
    name: str, folder=H200, time=lambda record: record.median_us
) -> list[tuple[dict, dict[str, float]]]:
    """For each workload of a record file: its axes, and every algo's median, or another `time`."""
    found: dict[str, tuple[dict, dict[str, float]]] = {}
    for record in store.load(folder / f"{name}.json").records:
        if time(record) and record.workload:
            at = found.setdefault(
                record.workload.uuid or str(record.workload.axes),
                (record.workload.axes, {}),
            )[1]
            at[record.algo] = time(record)
    return list(found.values())


def over_peers(name: str, algo: str, peers: tuple[str, ...], *time) -> list[float]:
    """The best peer's time over the algo's, at each size."""
    return [
        min(at[peer] for peer in peers if peer in at) / at[algo]
        for _, at in times(name, H200, *time)
    ]


@pytest.mark.records
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_readme_has_a_row_for_each_op_from_its_records(row):
    op, name, algo, size, peers_in, peers = row
    at = next(at for axes, at in times(name) if size.items() <= axes.items())
    ratios = over_peers(peers_in, algo, peers)
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    floor_ratio = three(at[algo] / at["copy"]) if "copy" in at else "-"
    cells = [
        duration(at[algo]),
        floor_ratio,
        *(f"{x:.2f}" for x in (min(ratios), mean)),
    ]
    cells.append(f"{max(ratios):.2f} |")
    rows = [
        line.split(" | ")
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    ]
    rows = [row[1:] for row in rows if row[0].startswith(f"| `{op}`")]
    assert any(
        row[0] == f"`{algo}`" and [row[1].split(" at ")[0], *row[2:]] == cells
        for row in rows
    ), cells


@pytest.mark.records
@pytest.mark.parametrize("peer", PACKED)
def test_readme_says_how_long_the_peers_of_its_figure_take(peer):
    ratios = over_peers("decode-packed-tp1-peers", "cuda-v5-packed", (peer,))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert re.search(
        rf"`{peer}`\)[^`]* takes {min(ratios):.2f} to {max(ratios):.2f} times", text
    )


@pytest.mark.records
@pytest.mark.parametrize(
    ("heads", "names"),
    [
        ("4/8", ["prefill-peers"]),
        ("8/16", ["prefill-tp2-peers"]),
        ("16/32", ["prefill-tp1-peers"]),
        ("16/64", [f"prefill-tp1-ratio4-peers{n}" for n in ("", "-2", "-3")]),
        ("the contest's 100", ["prefill-peers-contest"]),
    ],
)
def test_results_say_how_fast_prefill_is_beside_its_peers(heads, names):
    ratios, spans = (
        [
            ratio
            for name in names
            for ratio in over_peers(name, "cuda-chunk", READY, time)
        ]
        for time in (
            lambda record: record.median_us,
            lambda record: record.timing and record.timing.span_us,
        )
    )
    mean, mean_of_spans = (
        math.exp(math.fsum(map(math.log, each)) / len(each)) for each in (ratios, spans)
    )
    assert len(ratios) == len(spans) == (100 if "100" in heads else 17)
    row = f"| {heads} | {min(ratios):.2f} | {mean:.2f} | {max(ratios):.2f} | {mean_of_spans:.2f} |"
    assert row in (ROOT / "docs" / "results" / "prefill.md").read_text(encoding="utf-8")


@pytest.mark.records
def test_readme_shows_a_bench_that_was_run():
    run = times("decode-quick", H200.parent / "epyc-2cpu")
    made = {
        (axes["batch_size"], algo): us for axes, at in run for algo, us in at.items()
    }
    block = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .split("tier wall\n")[1]
        .split("```")[0]
    )
    size, shown = None, {}
    for line in block.splitlines()[1:]:
        if row := re.match(r"(?:B=(\d+))? +([\w-]+)(?: \*)? +([\d.]+ [mu]s) ", line):
            size = int(row[1] or size)
            shown[size, row[2]] = row[3]
    assert len(shown) == 8 and shown == {key: duration(made[key]) for key in shown}


@pytest.mark.records
@pytest.mark.parametrize(
    "page",
    [
        p
        for p in PAGES
        if "\n<!-- gdn report " in (ROOT / p).read_text(encoding="utf-8")
    ],
)
def test_a_page_is_what_its_records_say(page, gdn, tmp_path):
    """The figures may differ by a version of matplotlib; the text may not."""
    (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
    text = shutil.copy(ROOT / page, tmp_path / page).read_text(encoding="utf-8")
    (tmp_path / "results").symlink_to(ROOT / "results")
    assert gdn("report", "--update", tmp_path / page).code == 0
    assert (tmp_path / page).read_text(encoding="utf-8") == text, (
        f"run `gdn report --update {page}`"
    )


@pytest.mark.records
def test_the_bytes_that_decode_bf16_moves():
    text = (helpers.OURS / "gdn_decode_bf16" / "README.md").read_text()
    for batch_size in (1, 8, 64, 256):
        ops = (REGISTRY.ops[name] for name in ("gdn_decode_bf16", "gdn_decode"))
        narrow, wide = (
            round(floor.bytes_moved(op, {"batch_size": batch_size}) / 1024, 1)
            for op in ops
        )
        assert f"| {batch_size} | {narrow} | {wide} |" in text


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and MkDocs make from a page's headings."""
    found = re.findall(r"^#+ +(.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in found
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_there_are(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|`[^`\n]+`", "", text, flags=re.S)
    broken = []
    for link in re.findall(r"\]\(<?([^)>\s]+)>?\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if (
            name
            and target.resolve().relative_to(ROOT).as_posix() in MADE
            and not target.exists()
        ):
            continue
        if not target.exists() or (
            heading and heading not in anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert broken == []


def test_readme_is_short_and_names_every_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    index = (ROOT / "docs" / "pages.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "pages.md" or f"({path.name})" in index, path.name
