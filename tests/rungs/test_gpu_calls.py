"""On a GPU: every rung from new threads, which have no CUDA context current, and at
addresses that no kernel takes.

A fault here takes the context down, and every later test of the process with it: the
first failure is the one to read.
"""

import functools
import json
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import helpers
import oracle
import pytest
import torch
from library.test_call_checks import shifted
from rungs.prompts import Prompt

from gdn import load
from gdn_cli.worker.judge import check

pytestmark = pytest.mark.gpu

REGISTRY = helpers.REGISTRY
RUNGS = [pytest.param(a, id=a.full_name) for a in REGISTRY.algos if "cuda" in a.modes]
# written here: these the judge calls as they are, without `load` around them
OURS = [
    p
    for p in RUNGS
    if p.values[0].language in ("cuda", "triton") and not p.values[0].packages
]
# their calls may have outputs of their own, at multiples of 16 bytes; the others:
# rungs/test_mtp.py
APART = [p for p in OURS if not REGISTRY.ops[p.values[0].op].in_place_only]
# cuda-chunk: a long one, which its wgmma kernels have; many, which it walks in order of
# length; short ones
PREFILLS = [dict(lengths=n) for n in ((1100,), (130,) * 40, (5, 64, 3))]
ATTENTION = [dict(batch_size=2, seq_len=512), dict(batch_size=1, seq_len=2048)]
CASES = helpers.of_each_op(
    {
        "gdn_decode": [dict(batch_size=3)],
        # heads of 2, 1 and 8 CTAs
        "gdn_layer_post_conv": [
            dict(batch_size=20, seq_len=1),
            dict(batch_size=40, seq_len=5),
            dict(batch_size=3, seq_len=4),
        ],
        "gdn_layer": [dict(batch_size=3), dict(batch_size=70)],
        "gdn_mtp": [dict(batch_size=3, seq_len=4)],
        "gdn_prefill": PREFILLS,
        "attention_fwd": ATTENTION,
    }
)
NEW = 4  # threads


def in_new_threads(work):
    """What `work(i)` gives in each of some threads that begin it together; what one
    raises is raised here.
    """
    start = threading.Barrier(NEW)

    def body(i):
        start.wait()
        return work(i)

    with ThreadPoolExecutor(NEW) as threads:
        return list(threads.map(body, range(NEW)))


def rung(algo):
    helpers.needs(algo)
    return load(algo.full_name)


def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")


def replayed(graph):
    """Replay on the second GPU, and wait for it."""
    with torch.cuda.device(1):  # replay is on the current device's stream
        graph.replay()
    torch.cuda.synchronize("cuda:1")


def on(device, inputs):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]


@functools.cache
def _exact(op, case):
    exact = getattr(oracle, op)(*oracle.inputs(op, **json.loads(case)))
    return exact if isinstance(exact, tuple) else (exact,)


def right(op, outputs, case):
    """Whether they are what float64 gives for `oracle.inputs(**case)`."""
    exact = _exact(op.name, json.dumps(case))
    for (name, bound), x, y in zip(op.tolerance.items(), outputs, exact, strict=True):
        assert oracle.error(x, y) <= bound, name  # NaN is not


def called(call, inputs):
    """The outputs; a skip where one of PyTorch's backends does not take the shape, as
    it says itself.
    """
    try:
        return call(*inputs)
    except RuntimeError as e:
        if "does not run here" in str(e):
            pytest.skip(str(e))
        raise


# --- threads


@pytest.mark.parametrize("algo", RUNGS)
def test_every_rung_from_four_new_threads_at_once(algo):
    """The main thread's bits, so the main thread's way; of a peer and of torch, which
    choose as they like, the right values.
    """
    call, op = rung(algo), REGISTRY.ops[algo.op]
    for case in CASES[algo.op]:
        inputs = on("cuda", oracle.inputs(algo.op, **case))
        first = called(call, inputs)
        torch.cuda.synchronize()
        for outputs in in_new_threads(lambda _, inputs=inputs: call(*inputs)):
            right(op, outputs, case)
            if not algo.packages and algo.language != "python":
                assert all(
                    torch.equal(a, b) for a, b in zip(first, outputs, strict=True)
                ), case


@pytest.mark.parametrize("algo", APART)
def test_what_a_judge_calls_from_new_threads(algo):
    op, kernel = helpers.built(algo.full_name, "cuda")
    for case in CASES[algo.op]:
        given = oracle.inputs(algo.op, **case)
        inputs = on("cuda", given)
        # filled with NaN
        outputs = [
            check.allocate(op, helpers.axes_of(op, given), "cuda") for _ in range(NEW)
        ]
        torch.cuda.synchronize()
        in_new_threads(
            lambda i, inputs=inputs, outputs=outputs: kernel(inputs, outputs[i])
        )
        torch.cuda.synchronize()
        for each in outputs:
            right(op, each, case)


FRESH = """
import sys, json, torch, oracle
from rungs import test_gpu_calls as t
from gdn import load; from gdn_cli.catalog import registry
name, case = sys.argv[1], json.loads(sys.argv[2])
op = t.REGISTRY.ops[name.split("/")[0]]
made = []
def make():
    made.append((load(name), t.on("cuda", oracle.inputs(op.name, **case))))
    torch.cuda.synchronize()
maker = t.threading.Thread(target=make); maker.start(); maker.join()
call, inputs = made[0]
for outputs in t.in_new_threads(lambda _: call(*inputs)):
    t.right(op, outputs, case)
print("right")
"""


@pytest.mark.parametrize("algo", OURS)
def test_the_first_calls_of_a_process_come_from_four_new_threads(algo):
    """Nothing has been asked of the device, no kernel loaded, and the main thread never
    has a context.
    """
    helpers.needs(algo)
    path = os.pathsep.join([str(helpers.TESTS), *sys.path])
    case = json.dumps(CASES[algo.op][0])
    env = {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
    }
    done = helpers.python("-c", FRESH, algo.full_name, case, env=env)
    assert (done.code, done.out) == (0, "right\n"), done.err


@pytest.mark.parametrize("algo", [p for p in APART if p.values[0].language == "cuda"])
def test_a_binding_launches_where_its_tensors_are(algo):
    """From the main thread and from a new one, with another device current, which stays so."""
    two_gpus()
    op, kernel = helpers.built(algo.full_name, "cuda")
    case = CASES[algo.op][0]
    given = oracle.inputs(algo.op, **case)
    inputs = on("cuda:1", given)
    outputs = check.allocate(op, helpers.axes_of(op, given), "cuda:1")

    def work(_):
        kernel(inputs, outputs)  # all threads write the same
        assert torch.cuda.current_device() == 0

    for run in (work, lambda _: in_new_threads(work)):
        for x in outputs:
            x.zero_()
        torch.cuda.synchronize("cuda:1")
        run(0)
        torch.cuda.synchronize("cuda:1")
        right(op, outputs, case)


@pytest.mark.parametrize("algo", RUNGS)
def test_every_rung_on_another_gpu(algo):
    """From the main thread, from new ones, and from a CUDA graph; the first GPU is
    current, and stays so.
    """
    two_gpus()
    call, op = rung(algo), REGISTRY.ops[algo.op]
    for case in CASES[algo.op]:
        given = oracle.inputs(algo.op, **case)
        there = on("cuda:1", given)
        here_first = called(call, on("cuda:0", given))
        calls = [call(*there), *in_new_threads(lambda _, there=there: call(*there))]
        assert torch.cuda.current_device() == 0
        # others may wait, which no graph can
        if not algo.packages and algo.language != "python":
            stream, graph = torch.cuda.Stream("cuda:1"), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = call(*there)
            for x in captured:
                x.fill_(float("nan"))
            with torch.cuda.device(1):  # replay is on the current device's stream
                graph.replay()
            calls.append(captured)
        torch.cuda.synchronize("cuda:1")
        for outputs in calls:
            assert {x.device.index for x in outputs} == {1}
            right(op, outputs, case)
        right(op, here_first, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_serving_on_another_gpu(dtype):
    """The three functions, from the main thread, from new ones, and from a CUDA graph;
    the first GPU is current.
    """
    two_gpus()
    x = Prompt(4, 8, (1,) * 3, dtype, "cuda:1")

    def check(output, pool):
        assert output.device.index == pool.device.index == 1
        for i, tokens in enumerate(output.reshape(3, 1, 8, 128)):
            x.check(i, tokens, pool[i + 1])

    for function in (x.decode, lambda pool: x.verify(pool, x.slots), x.prefill):
        check(*function(x.pool.clone()))
        for results in in_new_threads(lambda _, f=function: f(x.pool.clone())):
            check(*results)
        assert torch.cuda.current_device() == 0
        pool = x.pool.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1")):
            output, _ = function(pool)
        pool.copy_(x.pool)
        replayed(graph)
        check(output, pool)


# --- addresses


def each_odd(names, tensors):
    """(number, name, all tensors, this one an element after an aligned address)."""
    for i, (name, x) in enumerate(zip(names, tensors, strict=True)):
        if isinstance(x, torch.Tensor):
            yield i, name, [*tensors[:i], shifted(x), *tensors[i + 1 :]]


# CUDA kernels read these an element at a time (test_bindings.py has each tensor)
ONE_BY_ONE = "a", "b", "A_log", "dt_bias"


@pytest.mark.parametrize("algo", RUNGS)
def test_load_takes_or_refuses_an_odd_address_of_any_tensor(algo):
    """Bindings ask what their kernels need; for other rungs it is 16 bytes."""
    call, op = rung(algo), REGISTRY.ops[algo.op]
    case = CASES[algo.op][-1]
    inputs = on("cuda", oracle.inputs(algo.op, **case))
    count = len(inputs)
    made = [torch.empty_like(x) for x in called(call, inputs)]
    compiled = algo.language == "cuda"
    aligned = "(4|8|16|32)" if compiled else "16"
    names = [*op.inputs, *(name if compiled else f"out: {name}" for name in op.outputs)]
    for i, name, odd in each_odd(names, [*inputs, *made]):
        if op.in_place_only and i >= count:
            continue
        out = {"out": tuple(odd[count:])} if i >= count else {}
        try:
            outputs = call(*odd[:count], **out)
        except ValueError as e:
            said = rf"{name}: expected .*aligned to {aligned} bytes; call \."
            assert re.match(rf"{said}|{name}: .*; pass one", str(e)), e
            assert not compiled or name not in ONE_BY_ONE
        else:
            assert compiled
            right(op, outputs, case)
    torch.cuda.synchronize()  # the context lives
    right(op, call(*inputs), case)


@pytest.mark.parametrize("algo", APART)
def test_a_binding_takes_or_refuses_an_odd_address_of_any_tensor(algo):
    """Right where a kernel reads one element at a time, refused by name elsewhere."""
    op, kernel = helpers.built(algo.full_name, "cuda")
    case = CASES[algo.op][-1]
    given = oracle.inputs(algo.op, **case)
    inputs = on("cuda", given)
    count = len(inputs)
    outputs = check.allocate(op, helpers.axes_of(op, given), "cuda")
    for _, name, odd in each_odd((*op.inputs, *op.outputs), [*inputs, *outputs]):
        said = rf"{name}: expected a pointer aligned to (8|16|32) bytes; call \.clone\(\) on it"
        try:
            kernel(odd[:count], odd[count:])
        except ValueError as e:
            assert re.search(said, str(e)), e
            assert algo.language != "cuda" or name not in ONE_BY_ONE
        else:
            right(op, odd[count:], case)
    torch.cuda.synchronize()
    kernel(inputs, outputs)
    right(op, outputs, case)


# --- autocast


@pytest.mark.parametrize("algo", [p for p in RUNGS if not p.values[0].packages])
def test_autocast_around_a_call_changes_nothing_in_it(algo):
    call = rung(algo)
    inputs = on("cuda", oracle.inputs(algo.op, **CASES[algo.op][-1]))
    plain = called(call, inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cast = call(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


# --- a slower way

WITH_WGMMA = [
    "gdn_prefill/cuda-chunk",
    "attention_fwd/flashcore-v4",
    "attention_fwd_causal/flashcore-v4-causal",
]
LOADED = """
import sys, warnings
from gdn import load, serving
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    load(sys.argv[1]), load(sys.argv[1])
print([str(w.message) for w in seen if w.category is UserWarning])
"""


@pytest.mark.parametrize("name", WITH_WGMMA)
@pytest.mark.parametrize("built_for", ["9.0a", "9.0"])
def test_a_build_without_wgmma_says_so(name, built_for):
    algo = REGISTRY.find(name)
    helpers.needs(algo)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no GPU with wgmma here")
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "TVM_FFI_CUDA_ARCH_LIST": built_for}
    env |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    env["FIB_CACHE_PATH"] = (
        # the cache's key does not contain the architecture
        f"{os.environ['FIB_CACHE_PATH']}-{built_for}"
    )
    done = helpers.python("-c", LOADED, name, env=env)
    assert done.code == 0, done.err
    why = (
        "mma.sync in place of wgmma, which is not in a build for sm_90, only for sm_90a"
    )
    assert done.out == (f"{[f'{name}: {why}']}\n" if built_for == "9.0" else "[]\n")


@pytest.mark.parametrize("name", WITH_WGMMA)
def test_gdns_own_build_takes_what_its_gpu_has(name):
    if "TVM_FFI_CUDA_ARCH_LIST" in os.environ:
        pytest.skip("TVM_FFI_CUDA_ARCH_LIST says what to build for")
    algo = REGISTRY.find(name)
    _, kernel = helpers.built(name, "cuda")
    inputs = on("cuda", oracle.inputs(algo.op, **CASES[algo.op][0]))
    assert kernel.fallback() is None and kernel.backend(inputs) is None
    assert re.search(r"-sm_\w+$", kernel.runnable.metadata.solution_name)
