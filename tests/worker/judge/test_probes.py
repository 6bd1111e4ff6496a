"""Each probe catches its cheats, and no honest algo: by the built kernels that a worker
would run.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import cheats
import helpers
import problems
import pytest
import torch
from msgspec import structs
from problems import caught

from gdn_cli.catalog import pack
from gdn_cli.catalog.ops import Heads
from gdn_cli.catalog.workloads import embedded, select
from gdn_cli.machine import inventory
from gdn_cli.worker.executor import build, calls
from gdn_cli.worker.judge import check, probes
from gdn_cli.worker.judge.probes import async_work as late_probe
from gdn_cli.worker.judge.probes import caching
from gdn_cli.worker.judge.probes.harness import GUARD, Guards

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
SMALL = {
    "gdn_decode": ["batch_size=1", "batch_size=3"],
    "gdn_layer": ["batch_size=2"],
    "gdn_layer_post_conv": ["batch_size=2,seq_len=3"],
    "gdn_mtp": ["batch_size=2,seq_len=3"],
    "gdn_prefill": ["total_seq_len=16,num_seqs=1", "seq_lens=3+5"],
    "attention_fwd": ["seq_len=1", "seq_len=67"],
}
# for a GPU, where these take no longer
LARGER = {
    "gdn_decode": ["batch_size=64"],
    "gdn_layer": ["batch_size=64"],
    "gdn_layer_post_conv": ["batch_size=64,seq_len=4"],
    "gdn_mtp": ["batch_size=64,seq_len=4"],
    "gdn_prefill": ["seq_lens=1+64+65", "seq_lens=2x300"],
    "attention_fwd": ["seq_len=512", "batch_size=2,seq_len=67"],
}


def sizes(op: str, table: dict[str, list[str]] = SMALL) -> list[str]:
    """Words for `-w`; variants of an op have fewer small ones."""
    chosen = table[max(filter(op.startswith, table), key=len)]
    variant = op.endswith(("packed_bf16", "causal")) and table is SMALL
    return chosen[-1:] if variant else chosen


def work_of(op, chosen: str, device: str = "cpu") -> problems.Work:
    workload, *_ = select(op, embedded(op), chosen=[chosen])
    return problems.Work(op, workload, device)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(cheat or source, op, device) -> its kernel, built again: nothing is
    remembered from an earlier test.
    """

    def make(source, op=DECODE, device="cpu"):
        cheat = isinstance(source, cheats.Cheat)
        keys = source.keys() if cheat else {"sources": source}
        folder = tmp_path_factory.mktemp("probes")
        return problems.kernel(folder, op, device=device, **keys)

    return make


@pytest.fixture(scope="module")
def decode():
    return work_of(DECODE, "batch_size=1")


@pytest.fixture
def patience(monkeypatch):
    """patience(cheat): how long late results are waited for; under load a thread may
    take its time.
    """
    return lambda cheat: monkeypatch.setattr(
        late_probe, "_LATE_S", 60.0 if cheat.probe == "late-work" else 0.1
    )


# --- cheats


@pytest.mark.parametrize("name", cheats.CHEATS)
def test_a_cheat_is_caught_by_its_probe(name, make, decode, patience):
    cheat = cheats.CHEATS[name]
    patience(cheat)
    if cheat.language == "cpp" and not inventory.cxx():
        pytest.skip("no C++ compiler here")
    kernel = make(cheat)
    if cheat.checked:  # the check alone lets it pass
        assert decode.check(kernel).reason is None
    found = caught(decode.probe(kernel))
    # the first is the one that a user is shown
    assert next(iter(found), None) == cheat.probe, found
    assert cheat.says in found[cheat.probe]
    assert "\n" not in found[cheat.probe]


def test_every_probe_has_its_cheats():
    assert {cheat.probe for cheat in cheats.CHEATS.values()} == set(probes.USUAL)


@pytest.mark.parametrize("probe", probes.USUAL)
def test_a_probe_alone_catches_its_cheats(probe, make, decode, patience):
    """Nothing that another probe did before is needed."""
    for cheat in cheats.CHEATS.values():
        if cheat.probe == probe and cheat.language == "python":
            patience(cheat)
            kernel = make(cheat)
            # a cheat that remembers addresses must not see one again by chance
            held = []
            for _ in range(3):  # what goes by the number of calls has had some
                held.append(check.cloned(decode.inputs))
                empty = Guards().empty
                kernel(held[-1], check.allocate(DECODE, decode.axes, "cpu", empty))
            found = decode.probe(kernel, [probe])
            assert list(found) == [probe] and found[probe], cheat


def test_one_set_of_results_is_not_taken_for_a_memory(make, decode):
    """It computes every call, and only remembers the address of the results."""
    # right at every return: nothing is waited for
    kernel = make(cheats.CHEATS["has-one-set-of-results"])
    assert list(caught(decode.probe(kernel))) == ["overwritten-results"]


# attention in float16: another op, another dtype, results that may be an input
ATTENTION = {
    "gives-v-back": ("overwritten-results", "output changed when the inputs got new values", "return v"),
    "remembers": ("pointer-cache", "stayed the same", "return kept.setdefault(q.data_ptr(), v.clone())"),
    "fingerprint": (
        "content-cache", "single elements of v changed",
        "return kept.setdefault(float(v.view(-1)[0]), v.clone()).clone()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_cheats_in_float16(name, make, monkeypatch):
    monkeypatch.setattr(late_probe, "_LATE_S", 0.1)
    op = REGISTRY.ops["attention_fwd"]
    work = work_of(op, "seq_len=1")  # one key: the output is v
    probe, says, body = ATTENTION[name]
    kernel = make(f"kept = {{}}\n\ndef run(q, k, v):\n    {body}\n", op)
    assert work.check(kernel).passed
    found = caught(work.probe(kernel))
    assert next(iter(found), None) == probe and says in found[probe]


def test_an_op_that_is_linear_in_nothing_is_probed_all_the_same(make, decode, patience):
    op = structs.replace(DECODE, linear_in=())
    assert caught(decode.probe(make(cheats.source("return CALL")), op=op)) == {}
    for name in (
        "remembers-addresses",
        "prepares-the-gates-once",
        "has-one-set-of-results",
        "remembers-contents",
    ):
        cheat = cheats.CHEATS[name]
        patience(cheat)
        found = caught(decode.probe(make(cheat), op=op))
        assert next(iter(found), None) == cheat.probe, (name, found)


# --- honest


def takes_long(algo) -> bool:
    """torch.compile, or a build of what other builds have in them."""
    parts = "gdn_layer_post_conv", "gdn_mtp"  # in gdn_layer's and gdn_mtp_packed's
    return algo.name == "pt-compiled" or (algo.op, algo.language) in [
        (part, "cpp") for part in parts
    ]


@pytest.mark.parametrize(
    ("algo", "chosen"),
    [
        pytest.param(
            a,
            chosen,
            id=f"{a.full_name}-{chosen}",
            marks=pytest.mark.slow if takes_long(a) else (),
        )
        for a in REGISTRY.algos
        if "cpu" in a.modes
        for chosen in sizes(a.op)
        # torch.compile compiles again for B = 1, which takes many seconds
        if not (a.name == "pt-compiled" and chosen == "batch_size=1")
    ],
)
@pytest.mark.sampled(9)
def test_no_honest_algo_is_caught(algo, chosen):
    if algo.language == "cpp" and not inventory.cxx():
        pytest.skip("no C++ compiler here")
    op, kernel = helpers.built(algo.full_name, "cpu")
    work = work_of(op, chosen)
    for _ in range(3):
        assert caught(work.probe(kernel)) == {}


@pytest.mark.parametrize(
    "algo", [a.full_name for a in REGISTRY.algos if "interpreter" in a.modes]
)
@pytest.mark.slow
def test_no_honest_algo_is_caught_in_tritons_interpreter(algo, interpreter):
    found = interpreter(interpreted, algo)
    assert list(found) == list(probes.USUAL) and caught(found) == {}


def interpreted(name: str) -> dict[str, str | None]:
    """The probes' findings, for the process of the fixture `interpreter`."""
    op, kernel = helpers.built(name, "interpreter")
    return work_of(few_heads(op), sizes(op.name)[0]).probe(kernel)


def few_heads(op):
    """The op with one head: the interpreter takes a second for all eight."""
    if op.heads:
        return REGISTRY.ops.at_heads(op.family, Heads(1, 1))
    return structs.replace(
        op,
        axes=op.axes | {n: 1 for n in op.axes if n.startswith("num_") and "heads" in n},
    )


HONEST = {
    "as-atomics-make-it": (
        """
        out, new = CALL
        calls.append(1)
        return out, new * (1 + 2e-7 * (len(calls) % 3))
        """
    ),
    "gives-views": (
        """
        out, new = CALL
        return torch.stack((out, out))[1], torch.stack((new, new), dim=-1)[..., 1]
        """
    ),
    "waits-for-its-thread": (
        """
        results = []
        thread = threading.Thread(target=lambda: results.extend(CALL))
        thread.start()
        thread.join()
        return results
        """
    ),
    # what may be remembered: buffers to work in, and what follows from integers
    "has-room-of-its-own": (
        """
        mine = kept.setdefault(state.shape, torch.empty_like(state))
        return right(q, k, v, mine.copy_(state), A_log, a, dt_bias, b, scale)
        """
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_unusual_honest_algos_are_not_caught(name, make, decode):
    assert caught(decode.probe(make(cheats.source(HONEST[name])))) == {}


def test_an_empty_workload_is_not_caught(make):
    op = DECODE
    kernel = make(cheats.source("return CALL"))
    one = dict(zip(op.inputs, work_of(op, "batch_size=1").inputs, strict=True))
    inputs = [
        x[:0] if op.inputs[name].shape and "batch_size" in op.inputs[name].shape else x
        for name, x in one.items()
    ]
    expected = check.oracle(build.reference(pack.definition(op, REGISTRY)), inputs)
    problem = check.Problem(op, {"batch_size": 0}, inputs, expected)
    assert caught(probes.run(helpers.local(kernel), problem)) == {}


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", cheats.GPU_CHEATS)
def test_a_cheat_is_caught_on_a_gpu(name, make, monkeypatch):
    # results computed too early are waited for in vain
    monkeypatch.setattr(late_probe, "_LATE_S", 1.0)
    cheat, work = cheats.GPU_CHEATS[name], work_of(DECODE, "batch_size=1", "cuda")
    kernel = make(cheat, device="cuda")
    if cheat.checked:
        assert work.check(kernel).reason is None
    else:  # compiling or loading at its first call must not make it late
        kernel(work.inputs, check.allocate(DECODE, work.axes, "cuda", Guards().empty))
        torch.cuda.synchronize()
    # the second time that one has seen all of the values
    for _ in range(1 if cheat.probe == "content-cache" else 3):
        found = caught(work.probe(kernel, [cheat.probe]))
        assert cheat.says in found.get(cheat.probe, ""), found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algo", "chosen"),
    [
        pytest.param(a, chosen, id=f"{a.full_name}-{chosen}")
        for a in REGISTRY.algos
        if "cuda" in a.modes
        for chosen in sizes(a.op) + sizes(a.op, LARGER)
    ],
)
def test_no_honest_algo_is_caught_on_a_gpu(algo, chosen):
    if (place := inventory.HERE.place(algo, "cuda")).mode is None:
        pytest.skip(f"{algo.full_name}: {place.reason}")
    op, kernel = helpers.built(algo.full_name, "cuda")
    work = work_of(op, chosen, "cuda")
    try:
        assert work.check(kernel).passed
    # one of PyTorch's attention backends, on a shape that it does not take
    except RuntimeError as e:
        if "does not run here" not in str(e):
            raise
        pytest.skip(str(e))
    for _ in range(3):
        assert caught(work.probe(kernel)) == {}


@pytest.mark.gpu
def test_a_side_stream_that_is_waited_for_is_not_caught(make):
    body = """
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            fill(output, new_state, CALL)
        current.wait_stream(side)
        """
    work = work_of(DECODE, "batch_size=3", "cuda")
    source = cheats.source(body, True, "side = torch.cuda.Stream()")
    kernel = make(
        cheats.Cheat("none", "nothing", source, destination_passing=True), device="cuda"
    )
    for _ in range(3):
        assert caught(work.probe(kernel)) == {}


# --- the probes themselves


class Fake:
    """Like build.Kernel: returns the function's results, or fills outputs with them;
    counts its calls.
    """

    def __init__(self, function, destination_passing: bool = False) -> None:
        self.function, self.destination_passing = function, destination_passing
        self.calls = 0

    def __call__(self, inputs, outputs) -> None:
        for out, x in zip(outputs, self.returns(inputs), strict=False):
            out.copy_(x)

    def returns(self, inputs) -> list:
        self.calls += 1
        return list(self.function(*inputs))


@pytest.fixture(scope="module")
def right():
    return build.reference(pack.definition(DECODE, REGISTRY)).entry_point


@pytest.mark.parametrize("destination_passing", [True, False])
@pytest.mark.parametrize(("took_s", "calls"), [(0.001, 31), (0.2, 24)])
def test_the_number_of_calls_is_what_the_docstring_says(
    took_s, calls, destination_passing, right, decode, monkeypatch
):
    seconds = caching._seconds
    undisturbed = lambda case, k: seconds(case, k) * 0 + took_s  # noqa: E731
    monkeypatch.setattr(caching, "_seconds", undisturbed)
    kernel = Fake(right, destination_passing)
    assert caught(decode.probe(kernel)) == {} and kernel.calls == calls
    counts = "31 on a CPU, 24 for a kernel that takes over 0.1 s, and 25 on a GPU"
    assert counts in " ".join(probes.__doc__.split())


@pytest.mark.parametrize("probe", probes.USUAL)
@pytest.mark.parametrize("destination_passing", [True, False])
def test_what_a_kernel_raises_is_the_probes_catch(probe, destination_passing, decode):
    def fails(*args):
        raise ValueError("q: expected contiguous\nand more")

    found = decode.probe(Fake(fails, destination_passing), [probe])
    if probe == "out-of-bounds" and not destination_passing:
        assert found == {probe: None}  # nothing to look at
    else:
        assert found == {probe: "raised ValueError: q: expected contiguous"}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_not_the_algos_fault(error, decode):
    def fails(*args):
        raise error

    with pytest.raises(type(error)):
        decode.probe(Fake(fails))


def test_results_of_another_form_are_caught(right, decode):
    def turns(form):
        calls = []

        def run(*args):
            calls.append(1)
            out, new = right(*args)
            return (out, new) if len(calls) == 1 else form(out, new)

        return run

    for form, says in (
        (lambda out, new: (out,), "returned 1 outputs, expected 2"),
        (lambda out, new: (out, None), "new_state: returned NoneType, expected"),
        (lambda out, new: (out, new.double()), "float64 on cpu, expected"),
        (lambda out, new: (out[0], new), "output: returned (1, 8, 128) bfloat16"),
    ):
        found = decode.probe(Fake(turns(form)), ["nondeterminism"])
        assert says in found["nondeterminism"]


def test_special_values_come_back_too(right):
    """Bit for bit: NaN with its payload, and negative zero."""
    work = work_of(DECODE, "batch_size=1")
    odd = torch.tensor([0x7FC1, -0x8000], dtype=torch.int16)
    work.inputs[0].view(torch.int16).view(-1)[:2] = odd
    # which waits for a NaN to become right
    names = [name for name in probes.USUAL if name != "late-work"]
    # that they come back is what `probe` itself asserts
    assert list(work.probe(Fake(right), names)) == names


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (5, 7)])
def test_guards_are_around_each_output_and_name_what_is_overwritten(dtype, shape):
    guards = Guards()
    out, other = (guards.empty(shape, dtype, "cpu") for _ in range(2))
    assert (out.shape, out.dtype) == (shape, dtype)
    assert out.is_contiguous() and out.data_ptr() % 4096 == 0
    out.fill_(1)
    other.fill_(2)
    assert guards.broken() == [None, None]
    block, begin, end = guards.blocks[0]
    assert begin >= GUARD and len(block) - end >= GUARD
    for where, says in (
        (begin - 1, "1 bytes written, 1 before its first"),
        (0, f"1 bytes written, {begin} before its first"),
        (end, "1 bytes written, 1 after its last"),
        (len(block) - 1, f"1 bytes written, {len(block) - end} after its last"),
    ):
        was, block[where] = int(block[where]), 0
        assert guards.broken() == [says, None]
        block[where] = was


def on_decode(kernel, work) -> probes.Case:
    return probes.Case(helpers.local(kernel), work.problem(kernel))


def clock(monkeypatch, repeat, fresh=lambda n: 0.01):
    """Stands in for the clock: fresh(n) seconds for the n-th fresh values, repeat(n)
    for their repeat. Gives all n.
    """
    asked = []

    def seconds(case, n):
        asked.append(n)
        return repeat(n) if n in asked[:-1] else fresh(n)

    monkeypatch.setattr(caching, "_seconds", seconds)
    return asked


@pytest.mark.parametrize(
    ("repeat", "caught"),
    [
        (lambda n: 0.01, False),
        (lambda n: 0.0059, True),
        (lambda n: 0.0061, False),
        # load on every second repeat: the faster of two counts
        (lambda n: 0.001 if n % 2 else 0.05, True),
        # on one group in eight
        (lambda n: 0.001 if (n - 1) // 2 % 8 != 7 else 0.05, True),
        (lambda n: 0.001 if (n - 1) // 2 % 5 != 4 else 0.05, False),
        # honest in the last seven groups
        (lambda n: 0.001 if n <= 66 else 0.01, False),
    ],
)
def test_repeats_are_accused_on_plain_evidence_alone(
    repeat, caught, monkeypatch, right, decode
):
    clock(monkeypatch, repeat)
    found = decode.probe(Fake(right), ["content-cache"])["content-cache"]
    assert (found is not None and "of the time of fresh ones" in found) is caught


def test_fresh_values_fall_on_even_and_on_odd_calls(monkeypatch, right, decode):
    asked = clock(monkeypatch, lambda n: 0.001)
    found = decode.probe(Fake(right), ["content-cache"])["content-cache"]
    assert found.startswith("values that it has just seen take 10% of the time")
    first = {n: asked.index(n) for n in asked}
    # each repeat follows on its fresh values
    assert all(asked[i + 1] == n for n, i in first.items())
    assert len(first) == 80 and sum(i % 2 for i in first.values()) == 40


@pytest.mark.parametrize(("repeat", "calls"), [(0.02, 120), (0.15, 2)])
def test_long_calls_are_few(repeat, calls, monkeypatch, right, decode):
    asked = clock(monkeypatch, lambda n: repeat, lambda n: 0.2)
    found = decode.probe(Fake(right), ["content-cache"])["content-cache"]
    assert (found is not None) is (repeat < 0.1) and len(asked) == calls


def test_noise_alone_does_not_look_like_a_cheat(monkeypatch, right, decode):
    """No accusation in 2000 searches where each call takes from a tenth to ten times as
    long as it should.
    """
    case = on_decode(Fake(right), decode)
    rng = random.Random(1)
    for _ in range(2000):
        noise = [lambda n: 0.001 * 10 ** rng.uniform(-1, 1)] * 2
        clock(monkeypatch, *noise)
        assert caching._faster_when_repeated(case) is None


# --- a GPU's probes without a GPU: their conclusions


@pytest.fixture
def stand_in(monkeypatch, decode, right):
    """stand_in(function) -> a Case that takes itself for one on a GPU; from the sleep to the next
    synchronisation late["now"] is true, and late["finish"] is what that one is to do."""
    late = {"now": False}

    def synchronize():
        late["now"] = False
        late.pop("finish", lambda: None)()

    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: late.update(now=True), raising=False
    )
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(calls, "_side_stream", object)
    monkeypatch.setattr(late_probe, "_LATE_S", 0.05)

    def make(function, destination_passing: bool) -> probes.Case:
        kernel = Fake(lambda *args: function(late, *args), destination_passing)
        case = on_decode(kernel, decode)
        case.gpu = True
        return case

    yield make
    for x, was in zip(
        decode.inputs, work_of(DECODE, "batch_size=1").inputs, strict=True
    ):
        if isinstance(x, torch.Tensor):
            x.copy_(was)


@pytest.mark.parametrize("destination_passing", [True, False])
def test_what_late_inputs_and_early_copies_tell(destination_passing, stand_in, right):
    def probe(function):
        case = stand_in(function, destination_passing)
        found = late_probe._late_on_gpu(case)
        case.restore()
        return found

    def early(late, q, k, v, state, *rest):
        return right(q, k, *(x * (not late["now"]) for x in (v, state)), *rest)

    def tired(late, *args):
        out, new = right(*args)
        return out * 0, new

    assert probe(lambda late, *args: right(*args)) is None
    assert cheats.EARLY in probe(early)
    assert probe(tired) is None  # wrong, and not because of when

    def unwaited(late, *args):
        """Its results are there once somebody waits for the whole device."""
        out, new = right(*args)
        held = torch.zeros_like(out)
        late["finish"] = lambda: held.copy_(out)
        return held, new

    if not destination_passing:  # Fake's own copy into given outputs would be too early
        assert cheats.LATE in probe(unwaited)


@pytest.mark.parametrize(
    ("traces", "says"),
    [
        # (kernels, ns) of fresh values, and of repeats
        ([("ab", 10, "ab", 10)], None),
        ([("ab", 10, "a", 9), ("ab", 10, "ab", 10)], None),
        ([("ab", 10, "a", 9), ("ab", 10, "b", 9)], None),  # not the same one
        ([("ab", 10, "ab", 5)] * 4 + [("ab", 8, "ab", 5)], None),
        ([("ab", 10, "a", 9)] * 5, "just seen b runs less often"),
        ([("abb", 10, "ab", 9)] * 5, "just seen b runs less often"),
        ([("abbc", 10, "ab", 9)] * 5, "just seen b, c runs less often"),
        ([("ab", 10, "ab", 5)] * 5, "just seen its kernels take 50% of the time"),
    ],
)
def test_repeats_are_accused_by_what_ran(traces, says, stand_in, right, monkeypatch):
    calls = iter(
        [half for a, b, c, d in traces for half in ((Counter(a), b), (Counter(c), d))]
    )
    monkeypatch.setattr(caching, "_trace", lambda case, k: next(calls))
    found = caching._skipped_repeats(stand_in(lambda late, *args: right(*args), True))
    assert (found is None) if says is None else says in found
    assert next(calls, None) is None


def test_without_a_trace_the_clock_decides(stand_in, right, monkeypatch):
    def no_trace(case, k):
        raise LookupError("nothing in the trace")

    monkeypatch.setattr(caching, "_trace", no_trace)
    monkeypatch.setattr(caching, "_faster_when_repeated", lambda case: 0.25)
    found = caching._skipped_repeats(stand_in(lambda late, *args: right(*args), True))
    assert "take 25% of the time of fresh ones" in found


def test_a_gpu_that_is_lost_is_named_once(decode, right, monkeypatch):
    """After an illegal access every call fails with the same words."""

    class Lost(probes.Case):
        def __init__(self, *args):
            super().__init__(*args)
            self.gpu = True

        def restore(self):
            raise RuntimeError("CUDA error: an illegal access\nCUDA kernel errors")

    monkeypatch.setattr(probes, "Case", Lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    names = ["inputs-changed", "zero-outputs", "nondeterminism"]
    lost = "left the GPU unusable: RuntimeError: CUDA error: an illegal access"
    after = "not probed: inputs-changed came before"
    found = decode.probe(Fake(right), names)
    assert found == dict(zip(names, [lost, after, after], strict=True))
