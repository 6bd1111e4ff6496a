"""The documentation: generated parts match the sources, and its commands work."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import helpers
import pytest

ROOT = helpers.TESTS.parent
sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402

RECORDS = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "checking.md",
        "cli.md",
        "records.md",
        pytest.param("results/leaders.md", marks=pytest.mark.records),
    ],
)
def test_generated_parts_are_as_the_sources_are(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == generate.page(name, generate.parts()[name]), (
        f"docs/{name} is stale: run `make pages` and commit it"
    )


def test_every_field_of_a_record_is_explained():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*) \|$", RECORDS, re.MULTILINE)
    assert ("median_us", "number", "the time") in rows
    assert [name for name, _, words in rows if not words.strip()] == []


# (command of gdn whose output is read, if any; the line of jq)
LINES = re.findall(
    r"^```sh\n(?:gdn (.*) \|\n  )?(jq .*?)\n```", RECORDS, re.MULTILINE | re.DOTALL
)


@pytest.mark.skipif(not shutil.which("jq"), reason="no jq")
@pytest.mark.parametrize("command, line", LINES)
def test_jq_lines(gdn, command, line):
    assert len(LINES) == 7
    given = gdn(*command.split()).out if command else ""
    done = subprocess.run(
        line,
        shell=True,
        cwd=ROOT,
        input=given,
        capture_output=True,
        text=True,
        timeout=helpers.PATIENCE_S,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    if "@tsv" in line:
        assert len({row.count("\t") for row in done.stdout.splitlines()}) == 1


# --- examples


def test_the_example_kernel_is_right(gdn):
    done = gdn(
        "run",
        "--algos",
        ROOT / "examples" / "algos",
        "--algo",
        "my-decode",
        "-w",
        "batch_size=8",
        "--json",
    )
    records = [
        record for record in done.json["records"] if record["algo"] == "my-decode"
    ]
    assert done.code == 0 and records
    assert {record["status"] for record in records} == {"passed"}


def test_the_example_plots(tmp_path):
    script, sweep = (
        ROOT / "examples" / "plot.py",
        ROOT / "results" / "h200" / "decode-sweep.json",
    )
    command = [
        sys.executable,
        script,
        sweep,
        "--algo",
        "cuda-v5",
        "-o",
        tmp_path / "a.png",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=helpers.PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_examples_of_clients_take_turns(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples" / "clients")
    import table
    import turns

    assert [str(x) for x in (turns.Point(1, 64), turns.Point(8, 128, 5))] == [
        "prompt 1x64",
        "decode 8x128",
    ]
    seconds = {1: (10.0, None), 5: (10.0, 2.0)}
    assert turns.Point(8, 128, 5).sample(seconds.get) == (10, 2, 4)
    assert turns.Point(2, 30).sample(seconds.get) == (10, None, 6)
    order = []
    samples = {
        "baseline": iter([turns.Sample(4.0, 2.0, 4.0), turns.Sample(2.0, 4.0, 2.0)]),
        "gdn": iter([turns.Sample(1.0, 1.0, 8.0), turns.Sample(2.0, 2.0, 4.0)]),
    }

    def run(kind, name):
        order.append((kind, name))
        return [next(samples[kind])]

    runs = [(kind, lambda name, kind=kind: run(kind, name)) for kind in turns.ORDER]
    found = turns.in_turns(runs, ["decode"])
    assert [kind for kind, _ in order] == ["baseline", "gdn", "gdn", "baseline"]
    capsys.readouterr()
    about = {"vllm": "0.33.0", "torch": "2.11.0", "heads": "16/32", "pool": "float32"}
    about |= {"layers": 24, "baseline": "triton", "fallbacks": {"f": 2}}
    times = {"baseline": 6.0, "gdn": 4.0}
    about["kernels"] = {
        kind: {"decode": {"gpu_ms": ms, "shares": {}}} for kind, ms in times.items()
    }
    about["errors"] = {"baseline": {"prompt": 0.02, "new": 0.03}}
    about["errors"]["gdn"] = {"prompt": 0.01, "new": 0.03}
    turns.finish(about, found, tmp_path / "a.jsonl")
    shown = capsys.readouterr().out.splitlines()
    expected = ["decode", "gdn", "1500", "1500", "6", "2.00x"]
    assert expected in [line.split() for line in shown]
    page = "a\n<!-- clients a.jsonl -->\nold\n<!-- /clients -->\nb\n"
    new = table.filled(page, tmp_path)
    assert new.startswith(
        "a\n<!-- clients a.jsonl -->\nvllm 0.33.0 (own prefill: triton)"
    )
    cells = "3,000 -> 1,500 | 3,000 -> 1,500 | 3 -> 6 | 2.000x | 6 -> 4 | 1.500x"
    assert f"| decode | {cells} |\n" in new
    assert "- rms error of log-probabilities, prompt tokens: 0.02 -> 0.01\n" in new
    assert new.endswith("- calls that fell back: 2\n<!-- /clients -->\nb\n")
    assert "\nNot timed yet.\n" in table.filled(page, tmp_path / "none")


def test_the_example_of_sglang_reads_what_its_benchmark_says(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples" / "clients")
    import sglang_qwen

    line = "x.py --heads 4/8 --batch 1,8 --pool bfloat16 -- --mem-fraction-static 0.4"
    monkeypatch.setattr("sys.argv", line.split())
    given, theirs = sglang_qwen.options()
    assert (given.heads, given.prompts) == ("4/8", "")
    assert theirs == ["--mem-fraction-static", "0.4"]
    asked = []

    def benchmark(command, **_):
        asked.append(command)
        record = {"batch_size": 8, "prefill_latency": 0.5, "median_decode_latency": 2.0}
        (tmp_path / "results.jsonl").write_text(json.dumps(record) + "\n")
        said = 'replaced ["decode"]\nWarmup ...\nfallbacks {"decode": 2}\n'
        return subprocess.CompletedProcess(command, 0, said)

    monkeypatch.setattr(subprocess, "run", benchmark)
    given.model = tmp_path
    answer = sglang_qwen.measure("gdn", given, theirs)
    assert (answer.replaced, answer.fallbacks) == (["decode"], {"decode": 2})
    (record,) = answer.records
    assert sglang_qwen.sample(record) == (0.5, 2.0, 4.0)
    assert asked[0][-3:] == ["--", "--mem-fraction-static", "0.4"]
    assert asked[0][asked[0].index("--pool") + 1] == "bfloat16"
    events = [
        {"name": "ours", "cat": "kernel", "dur": 3000.0},
        {"name": "copy", "cat": "gpu_memcpy", "dur": 1000.0},
        {"name": "launch", "cat": "cuda_runtime", "dur": 9000.0},
        {"name": "process_labels"},
    ]
    with gzip.open(
        tmp_path / "gdn_batch8_input128_output33_decode.trace.json.gz", "wt"
    ) as file:
        json.dump({"traceEvents": events}, file)
    times = sglang_qwen.kernels(given, "gdn", 8)
    assert times == {"gpu_ms": 1.0, "shares": {"ours": 0.75, "copy": 0.25}}


def test_the_gpus_time_of_a_token_is_without_that_of_the_prompt(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "clients")
    import turns

    monkeypatch.setattr(turns, "gpu_times", lambda run: run())
    times = {1: Counter(a=5.0), 9: Counter(a=13.0, b=16.0)}
    token = turns.kernels(times.get, turns.Point(2, 4, 5))
    assert token == {"gpu_ms": 3.0, "shares": {"b": 2 / 3, "a": 1 / 3}}
    prompt = turns.kernels(times.get, turns.Point(2, 4))
    assert prompt == {"gpu_ms": 5.0, "shares": {"a": 1.0}}


def test_the_example_of_vllm_times_the_steps_in_which_all_decode(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "clients")
    import turns
    import vllm_qwen

    class Engine:
        """A step takes a second; the first one of a request is its prompt, one in a step."""

        def __init__(self):
            self.now, self.left, self.begun = 0.0, {}, set()

        def add_request(self, name, prompt, new):
            assert len(prompt["prompt_token_ids"]) == 4
            self.left[name] = new

        def step(self):
            self.now += 1
            fresh = [name for name in self.left if name not in self.begun][:1]
            self.begun |= {*fresh}
            outputs = []
            for name in fresh or [*self.left]:
                self.left[name] -= 1
                text = SimpleNamespace(token_ids=[1])
                done = self.left[name] == 0
                outputs.append(
                    SimpleNamespace(request_id=name, outputs=[text], finished=done)
                )
            self.left = {name: n for name, n in self.left.items() if n}
            return outputs

    engine = Engine()
    reset = engine.begun.clear  # the same requests again, from their prompts
    llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=reset)
    monkeypatch.setattr(vllm_qwen, "greedy", lambda new: new)
    clock = SimpleNamespace(perf_counter=lambda: engine.now)
    monkeypatch.setattr(vllm_qwen, "time", clock)
    run = vllm_qwen.runner(llm, turns.Point(3, 4, 5))
    assert run(5) == (3, 1)
    assert run(1) == (3, None)
    rows = [[1, 2, 3, 4]] * 3
    times = vllm_qwen.serve(llm, rows, [3, 2, 2], at_once=2)
    start = times.arrivals[0]
    assert [x - start for x in times.first] == [1, 2, 4]
    assert [x - start for x in times.last] == [5, 3, 5]


def test_the_tables_of_clients_are_those_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "clients")
    import table

    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert len(table.BLOCK.findall(text)) == 1
    assert table.filled(text, ROOT) == text


def test_the_workflow_s_commands_exist(gdn, tmp_path):
    text = (ROOT / "examples" / "github-actions.yml").read_text(encoding="utf-8")
    commands = re.findall(r"\bgdn ([a-z]+) (.*)", text.partition("jobs:")[2])
    assert [name for name, _ in commands] == ["run", "pack", "compare"]
    for name, options in commands:
        known = gdn(name, "--help").out
        assert [
            option
            for option in re.findall(r"--\w+|-o\b", options)
            if option not in known
        ] == []
    packed = tmp_path / "base.json"
    done = gdn(
        "pack",
        "--algos",
        ROOT / "algos",
        "--name",
        "base",
        "-o",
        packed,
        env={"ALGO": "cpp-v1"},
    )
    assert done.code == 0 and json.loads(packed.read_text())["name"] == "base"


def test_load_is_listed_without_torch():
    code = (
        "import sys, gdn; print('load' in dir(gdn), 'load' in gdn.__all__, 'torch' in"
        " sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=helpers.PATIENCE_S,
    )
    assert done.stdout.split() == ["True", "True", "False"], done.stderr
