"""Our functions by an engine's own hooks: signatures, what is replaced, what falls back, and when.

The engines are stand-ins with the classes, names and signatures of the release; what is installed
is tried as well.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import logging
import pkgutil
import sys
import threading
import types
from pathlib import Path

import helpers
import pytest
import serving_steps as steps
import torch
from library.serving.test_layer import call as layer_call
from library.serving.test_layer import right as layer_right
from library.serving.test_layer import rows_of
from library.serving.test_layer_decode import call as decode_layer_call
from library.serving.test_layer_decode import faults as decode_layer_faults

from gdn import plugins, serving
from gdn.serving import library, sglang, vllm
from gdn.serving.client import Client, Hook, _kind
from gdn_cli.errors import GdnError, MissingError
from gdn_cli.machine import inventory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SIGNATURES = json.loads(
    (Path(__file__).parent / "signatures.json").read_text(encoding="utf-8")
)
ENGINES = {
    "vllm 0.33.0": vllm,
    "vllm 0.32.0": vllm,
    "sglang 0.5.23": sglang,
    "sglang 0.5.22": sglang,
}
EACH = pytest.mark.parametrize("release", ENGINES)
NEWEST = pytest.mark.parametrize("release", list(ENGINES)[::2])
VLLM = pytest.mark.parametrize("release", ["vllm 0.33.0"])
VLLMS = pytest.mark.parametrize("release", ["vllm 0.33.0", "vllm 0.32.0"])
SGLANGS = pytest.mark.parametrize("release", ["sglang 0.5.23", "sglang 0.5.22"])
KIND = (torch.float32, False)  # of a pool: on a CPU
DECODE = "fused_recurrent_gated_delta_rule_packed_decode"
UPDATE = "fused_sigmoid_gating_delta_rule_update"
DRAFTS = "fused_gdn_decode_post_conv_mtp"


class Registry:
    """vLLM's classes of layers and operators: a class that is registered by the name of another is
    made in its place."""

    taken: dict[str, type] = {}

    def __new__(cls, *args):
        return super().__new__(cls.taken.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, name):
        def register(ours):
            assert name not in cls.taken, f"Duplicate layer name: {name}"
            cls.taken[name] = ours
            return ours

        return register


class HookRegistry:
    """SGLang's: hooks are put around functions when all plug-ins have registered theirs."""

    def __init__(self) -> None:
        self.hooks: dict[str, object] = {}

    def register(self, target, hook, kind):
        assert kind == "around"
        self.hooks[target] = hook

    def apply_hooks(self):
        while self.hooks:
            target, hook = self.hooks.popitem()
            place, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(place)
            setattr(owner, name, self.around(getattr(owner, name), hook))

    def around(self, own, hook):
        return functools.wraps(own)(lambda *args, **named: hook(own, *args, **named))


@pytest.fixture
def engine(release, monkeypatch):
    """(our module for it, calls of its own functions): what the release has in modules of their
    names. Nothing is installed."""
    ours, calls = ENGINES[release], []
    client = ours.CLIENT
    for name in [n for n in sys.modules if n.split(".")[0] == client.package]:
        monkeypatch.delitem(sys.modules, name)

    def module(name: str) -> types.ModuleType:
        """With all above it."""
        parent, _, last = name.rpartition(".")
        if name not in sys.modules:
            made = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, made)
            if parent:
                setattr(module(parent), last, made)
        return sys.modules[name]

    registry = module("vllm.model_executor.custom_op")
    registry.PluggableLayer = type("PluggableLayer", (Registry,), {"taken": {}})
    registry.CustomOp = type("CustomOp", (Registry,), {"taken": {}})
    hooks = module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry = HookRegistry()
    hooks.HookType = types.SimpleNamespace(AROUND="around")
    for where, signature in SIGNATURES[release].items():
        home, _, path = where.partition(":")
        owner, _, name = path.rpartition(".")
        names = [part.partition("=")[0] for part in signature.split(", ")]
        body = f"calls.append(({name!r}, [{', '.join(names)}]))"
        exec(
            f"def {name}({signature}):\n    {body}\n    return 'own'",
            space := {"calls": calls},
        )
        place = module(home)
        if owner:
            kind = {"ChunkGatedDeltaRule": registry.CustomOp}
            base = kind.get(owner, registry.PluggableLayer)
            if not hasattr(place, owner):
                setattr(place, owner, type(owner, (base,), {}))
            place = getattr(place, owner)
        setattr(place, name, space[name])
    monkeypatch.setattr(client, "active", False)
    monkeypatch.setattr(client, "_replaced", set())
    monkeypatch.setattr(client, "_reports", {})
    monkeypatch.setattr(client, "_version", lambda: release.split()[1])
    client.fallbacks.clear()
    yield ours, calls
    client.fallbacks.clear()


@pytest.fixture
def stub(monkeypatch):
    """The calls that the libraries get, for pools on a CPU."""
    got = []
    for exported in (serving._decode, serving._verify, serving._prefill_bf16.function):
        monkeypatch.setitem(
            exported, KIND, lambda *args, name=exported.name: got.append((name, args))
        )
    return got


def decode_call(device: str = "cpu", **changed) -> dict:
    x = steps.tokens(3, 2, 6, device)
    mixed_qkv = torch.cat([x.pop(name).flatten(1) for name in "qkv"], dim=1)
    return x | dict(
        mixed_qkv=mixed_qkv, scale=0.1, initial_state=steps.pool(5, 6, device),
        out=torch.empty(3, 1, 6, 128, device=device, dtype=torch.bfloat16),
        ssm_state_indices=torch.tensor([1, 0, 3], dtype=torch.int32, device=device),
    ) | changed  # fmt: skip


# --- signatures and versions


@EACH
def test_signatures_are_those_of_the_release(release, engine, capsys):
    ours, _ = engine
    takes = [path for hook in ours.CLIENT.hooks for path in hook.takes]
    places = map(ours.CLIENT.place, takes)
    assert sorted(places) == sorted(SIGNATURES[release])
    assert set(ours.check().values()) == {None}
    ours.install()
    assert set(ours.check().values()) == {None}
    assert ours.CLIENT.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("can be replaced") for line in lines[::2]] == [True] * (
        len(lines) // 2
    )
    assert all(line.startswith("  falls back: ") for line in lines[1::2])


@VLLM
@pytest.mark.parametrize(
    "change",
    [
        ("scale", "scale, rows"),
        ("a, b", "b, a"),
        ("kernel=False", "kernel=True"),
        ("ssm_", ""),
    ],
)
def test_another_signature_is_told_and_not_replaced(engine, change, capsys, caplog):
    ours, _ = engine
    signature = SIGNATURES["vllm 0.33.0"][f"{vllm._LAYERS}:{DECODE}"]
    layers = sys.modules[vllm._LAYERS]
    exec(f"def {DECODE}({signature.replace(*change)}): ...", vars(layers))
    assert ours.CLIENT.main() == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert (
        f"{DECODE} takes ({signature.replace(*change)}), expected ({signature})" in line
    )
    with caplog.at_level(logging.WARNING, "gdn.serving"):
        assert len(ours.install()) == 2
    assert "QwenGatedDeltaNetAttention) is not replaced: " in caplog.text
    made = unmade(layers)
    assert type(made) is layers.QwenGatedDeltaNetAttention


@NEWEST
@pytest.mark.parametrize("version", ["0.34.0", "0.5.24", "0.3.3"])
def test_another_version_is_refused_with_a_line(
    release, engine, version, monkeypatch, caplog
):
    ours, _ = engine
    monkeypatch.setattr(ours.CLIENT, "_version", lambda: version)
    with caplog.at_level(logging.WARNING, "gdn.serving"):
        assert ours.install() == [] and ours.CLIENT.main() == 1
    assert len(caplog.records) == len(ours.CLIENT.hooks)
    known = {"vllm": "0.32.x or 0.33.x", "sglang": "0.5.22x or 0.5.23x"}[
        ours.CLIENT.package
    ]
    assert (
        f"is not replaced: version {version}, known is {known}; update gdn"
        in caplog.text
    )


def test_without_the_engine(monkeypatch, capsys):
    hook = Hook(
        "f", {"no_such_engine.ops:f": (serving.packed_decode,)}, lambda: None, ""
    )
    client = Client("no_such_engine", "no-such-engine", ("1.",), [hook])
    assert client.main() == 1
    line = capsys.readouterr().out
    assert (
        line.count("\n") == 1
        and "is no_such_engine installed in this environment, and what it needs?"
        in line
    )
    with pytest.raises(MissingError, match="No module named 'no_such_engine'"):
        client.install()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert client.main() == 1
    folded = capsys.readouterr().out
    assert folded.split() == line.split() and folded.count("\n") > 2
    del serving.client.FALLBACKS["no_such_engine"]


# --- vLLM's hooks


def unmade(layers) -> object:
    """A layer of the class that vLLM takes, without what its own __init__ does."""
    own = layers.QwenGatedDeltaNetAttention
    return own.__new__(own)


def vllm_layer(engine, convolved: list):
    """A layer as the model makes it, and the arguments of its decode."""
    layers = sys.modules[vllm._LAYERS]
    x = decode_call()

    def convolve(mixed, state, weight, bias, activation, **named):
        convolved.append(
            (state.shape, weight.shape, named["conv_state_indices"].tolist())
        )
        return mixed

    layers.causal_conv1d_update = convolve
    layers.is_conv_state_dim_first = lambda: False
    made = unmade(layers)
    made.head_v_dim, made.tp_size = 128, 1
    made.kv_cache = torch.zeros(5, 3, 7), x["initial_state"]
    weight = torch.zeros(7, 1, 4)
    made.conv1d = types.SimpleNamespace(weight=weight, bias=None)
    made.activation, made.head_k_dim = "silu", 128
    made.A_log, made.dt_bias = x["A_log"], x["dt_bias"]
    out = torch.empty(4, 6, 128, dtype=torch.bfloat16)
    slots = torch.tensor([1, 0, 3, 9], dtype=torch.int32)
    metadata = types.SimpleNamespace(
        num_actual_tokens=3, non_spec_state_indices_tensor=slots
    )
    padded = [torch.cat([x[name], x[name][:1]]) for name in ("mixed_qkv", "b", "a")]
    return made, (*padded, out, metadata)


@VLLM
def test_vllm_s_layer_decodes_on_ours(release, engine, stub):
    ours, calls = engine
    assert len(ours.install()) == 3
    made, args = vllm_layer(engine, convolved := [])
    made._forward_core_decode_non_spec(*args)
    assert convolved == [((5, 7, 3), (7, 4), [1, 0, 3])] and calls == []
    ((name, given),) = stub
    assert name == "packed_decode" and given[5] is made.kv_cache[1]
    assert (
        given[8].shape == (3, 1, 6, 128) and given[8].data_ptr() == args[3].data_ptr()
    )
    assert given[0].shape[0] == given[1].shape[0] == 3 and given[12:] == (1, 1e-6)
    made.kv_cache = made.kv_cache[0], made.kv_cache[1].double()
    made._forward_core_decode_non_spec(*args)
    assert len(convolved) == 2 and [name for name, _ in calls] == [DECODE]
    assert serving.fallbacks()["vllm"] == {DECODE: 1}
    ours.uninstall()
    made._forward_core_decode_non_spec(*args)
    assert len(calls) == 2 and serving.fallbacks()["vllm"] == {DECODE: 1}


class Batch:
    """A layer in vLLM's batch of decodes, then prompts: convolved tokens are the given ones."""

    H, HV = 2, 6

    def __init__(self, decodes: int, lengths, has=None, **changed) -> None:
        self.lengths, self.decodes = [1] * decodes + list(lengths), decodes
        count = len(self.lengths)
        self.total = sum(self.lengths)
        ends = torch.tensor([0, *self.lengths]).cumsum(0).int()
        self.has = torch.tensor([True] * decodes + list(has or [True] * len(lengths)))
        self.slots = torch.arange(count, 0, -1, dtype=torch.int32)
        self.metadata = types.SimpleNamespace(
            num_prefills=len(lengths), num_decodes=decodes, num_decode_tokens=decodes,
            num_actual_tokens=self.total, spec_sequence_masks=None,
            flashinfer_checkpoint_plan=None, has_initial_state=self.has,
            non_spec_state_indices_tensor=self.slots, non_spec_query_start_loc=ends,
            prefill_state_indices=self.slots[decodes:],
            prefill_query_start_loc=ends[decodes:] - decodes,
            prefill_has_initial_state=self.has[decodes:],
        )  # fmt: skip
        vars(self.metadata).update(changed)
        self.x = steps.tokens(self.total, self.H, self.HV, "cpu")
        self.pool = steps.pool(count + 1, self.HV, "cpu")
        self.convolved: list[dict] = []

    def layer(self, monkeypatch, attn_metadata: object = ()) -> object:
        layers = sys.modules[vllm._LAYERS]
        batch = {"layer": self.metadata} if attn_metadata == () else attn_metadata
        context = types.ModuleType("vllm.forward_context")
        context.get_forward_context = lambda: types.SimpleNamespace(attn_metadata=batch)
        monkeypatch.setitem(sys.modules, context.__name__, context)

        def convolve(x, weight, bias, states, starts, **named):
            self.convolved.append(named | {"states": states, "starts": starts})
            return x.clone()

        layers.causal_conv1d_fn = convolve
        layers.is_conv_state_dim_first = lambda: False
        made = unmade(layers)
        vars(made).update(
            prefix="layer", head_k_dim=128, head_v_dim=128, tp_size=1,
            key_dim=self.H * 128, value_dim=self.HV * 128, activation="silu",
            kv_cache=(torch.zeros(5, 3, 7), self.pool), A_log=self.x["A_log"],
            dt_bias=self.x["dt_bias"], get_state_dtype=lambda: (None, torch.float32),
            enable_fused_gdn_spec_decode=False, speculative_config=None,
            conv1d=types.SimpleNamespace(weight=torch.zeros(7, 1, 4), bias=None),
        )  # fmt: skip
        return made

    def call(self) -> dict:
        """One row more than there are tokens, as a batch has that is padded."""
        mixed = torch.cat([self.x[name].flatten(1) for name in "qkv"], dim=1)
        rows = {"mixed_qkv": mixed, "b": self.x["b"], "a": self.x["a"]}
        padded = {name: torch.cat([y, y[:1]]) for name, y in rows.items()}
        out = torch.zeros(self.total + 1, self.HV, 128, dtype=mixed.dtype)
        return padded | {"core_attn_out": out}

    def faults(self, before: torch.Tensor, out: torch.Tensor) -> list[str]:
        ends = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        sequences = [
            steps.Sequence(int(slot), slice(ends[n], ends[n + 1]), fresh=not has)
            for n, (slot, has) in enumerate(zip(self.slots, self.has, strict=True))
        ]
        x = self.x | {"norm": True, "scale": 128**-0.5}
        found = steps.faults(sequences, x, before, self.pool, out[: self.total])
        return found + ["padding is written"] * bool(out[self.total :].any())


@VLLMS
@pytest.mark.parametrize("decodes, lengths", [(0, [70]), (2, [3, 0, 5])])
@pytest.mark.sampled(2)
def test_vllm_s_layer_takes_prompts_to_its_pool(
    release, engine, decodes, lengths, monkeypatch
):
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    ours, calls = engine
    ours.install()
    has = [n % 2 == 1 for n in range(len(lengths))]
    batch = Batch(decodes, lengths, has)
    if release == "vllm 0.32.0":
        del batch.metadata.flashinfer_checkpoint_plan
    made = batch.layer(monkeypatch)
    call, before = batch.call(), batch.pool.clone()
    made._forward_core(**call)
    assert batch.faults(before, call["core_attn_out"]) == []
    ((convolution),) = batch.convolved
    assert convolution["states"].shape == (5, 7, 3)
    assert convolution["cache_indices"] is batch.slots
    assert convolution["metadata"] is batch.metadata
    assert calls == [] and serving.fallbacks()["vllm"] == {}
    ours.uninstall()
    made._forward_core(**call)
    assert [name for name, _ in calls] == ["_forward_core"]


@VLLM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllm_s_prefix_cache_gets_the_states_within_prompts(
    release, engine, dtype, monkeypatch
):
    """As vLLM plans it: 128 tokens of the first prompt, none of the second, 64 of the third."""
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    ours, calls = engine
    ours.install()
    plan = types.SimpleNamespace(
        every_n_tokens=64, num_checkpoints=3,
        cu_starts=torch.tensor([0, 2, 2, 3]), rows=torch.tensor([0, 1, 0, 2]),
    )  # fmt: skip
    checkpoint = object()
    batch = Batch(
        1, [130, 3, 70], flashinfer_checkpoint_plan=plan, checkpoint=checkpoint
    )
    batch.pool = batch.pool.to(dtype)
    made = batch.layer(monkeypatch)
    exported = []
    vars(made).update(
        _checkpoint_buffer_spec=((5, batch.HV, 128, 128), torch.float32),
        _checkpoint_exporter=types.SimpleNamespace(
            export=lambda *args, **named: exported.append((args, named))
        ),
    )
    workspace = types.ModuleType("vllm.v1.worker.workspace")
    workspace.current_workspace_manager = lambda: types.SimpleNamespace(
        get_simultaneous=lambda spec: [torch.full(spec[0], torch.nan, dtype=spec[1])]
    )
    monkeypatch.setitem(sys.modules, workspace.__name__, workspace)
    call, before = batch.call(), batch.pool.clone()
    made._forward_core(**call)
    assert batch.faults(before, call["core_attn_out"]) == []
    assert calls == [] and serving.fallbacks()["vllm"] == {}
    (((given,), named),) = exported
    assert given is checkpoint and named["recurrent_rows"] is plan.rows
    assert named["recurrent_state"] is batch.pool
    assert named["conv_state"].shape == (5, 7, 3)
    assert named["cu_seqlens"] is batch.metadata.non_spec_query_start_loc
    assert torch.equal(named["raw_qkv"], call["mixed_qkv"][: batch.total])
    kept = named["recurrent_checkpoint"]
    assert len(kept) == 3
    x = batch.x
    for row, tokens in ((1, 128), (3, 64)):
        begin = sum(batch.lengths[:row])
        parts = [x[name][begin : begin + tokens] for name in "qkvab"]
        state = before[batch.slots[row]]
        right = steps.walk(state, *parts, x["A_log"], x["dt_bias"], 128**-0.5)[1][-1]
        assert steps.error(kept[plan.rows[row]], right) < steps.STATE[dtype]


@VLLM
def test_prompts_that_stay_vllm_s_own(release, engine, monkeypatch, caplog):
    why = "decodes of more than one token"
    ours, calls = engine
    ours.install()
    batch = Batch(2, [3], num_decode_tokens=4)
    with caplog.at_level(logging.WARNING, "gdn.serving"):
        batch.layer(monkeypatch)._forward_core(**batch.call())
    assert [name for name, _ in calls] == ["_forward_core"] and not batch.convolved
    name = "QwenGatedDeltaNetAttention._forward_core"
    assert serving.fallbacks()["vllm"] == {name: 1} and why in caplog.text


@VLLM
def test_prompts_in_float16(release, engine, monkeypatch):
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    ours, calls = engine
    ours.install()
    batch = Batch(1, [70])
    for name in "qkvab":
        batch.x[name] = batch.x[name].half()
    call, before = batch.call(), batch.pool.clone()
    batch.layer(monkeypatch)._forward_core(**call)
    assert call["core_attn_out"].dtype == torch.float16
    assert batch.faults(before, call["core_attn_out"]) == []
    assert calls == []


@VLLM
def test_a_pool_that_is_refused_is_refused_before_the_convolution(
    release, engine, stub, monkeypatch
):
    ours, calls = engine
    ours.install()
    batch = Batch(1, [3])
    made = batch.layer(monkeypatch)
    made.kv_cache = made.kv_cache[0], batch.pool.double()
    made._forward_core(**batch.call())
    assert len(calls) == 1 and not batch.convolved and not stub
    made.kv_cache = made.kv_cache[0], batch.pool

    def broken(*args):
        if args[8].shape[0]:  # a call of no sequence asks
            raise ValueError("pool: no")

    monkeypatch.setitem(serving._prefill_bf16.function, KIND, broken)
    with pytest.raises(RuntimeError, match="pool: no; the cache cannot be used"):
        made._forward_core(**batch.call())
    assert len(batch.convolved) == 1 and len(calls) == 1


@VLLM
@pytest.mark.parametrize(
    "batch",
    [
        Batch(2, [], num_prefills=0),  # decodes alone, which vLLM hands on
        Batch(0, [4], spec_sequence_masks=torch.ones(1)),
    ],
)
def test_other_batches_are_no_fallback(release, engine, stub, batch, monkeypatch):
    ours, calls = engine
    ours.install()
    batch.layer(monkeypatch)._forward_core(**batch.call())
    assert [name for name, _ in calls] == ["_forward_core"] and not batch.convolved
    assert serving.fallbacks()["vllm"] == {}


@VLLM
def test_libraries_are_loaded_while_vllm_measures_its_memory(
    release, engine, monkeypatch
):
    ours, calls = engine
    ours.install()
    loaded = []
    libraries = serving._decode, serving._prefill_bf16.function, serving._layer_decode
    for exported in libraries:
        monkeypatch.setattr(
            type(exported),
            "__missing__",
            lambda self, kind: loaded.append((self.name, kind)),
        )
        monkeypatch.delitem(exported, KIND, raising=False)
    batch = Batch(0, [4])
    batch.layer(monkeypatch, None)._forward_core(**batch.call())
    assert loaded == [(library.name, KIND) for library in libraries[:2]]
    assert len(calls) == 1 and serving.fallbacks()["vllm"] == {}
    loaded.clear()
    made = batch.layer(monkeypatch, None)
    made.enable_fused_gdn_spec_decode = True
    rows = torch.zeros(4, 8)
    made._forward_core_fused_norm_packed(mixed_qkvz=rows, ba=rows, core_attn_out=rows)
    assert loaded == [(library.name, KIND) for library in libraries]
    assert [name for name, _ in calls][1:] == ["_forward_core_fused_norm_packed"]


class Drafts:
    """A layer in vLLM's batch of drafts alone, after the convolution, and one row more than there
    are requests, as in a table of all."""

    def __init__(self, dtype=torch.float32, **changed) -> None:
        slots, lengths = rows_of(3, 4), [4, 1, 3]
        self.x = layer_call(
            slots, lengths, [1, 3, 2], 13, 2, 6, "cpu", dtype, **changed
        )
        more = [torch.cat([y, y[:1]]) for y in map(self.x.get, self.tables)]
        names = (
            "spec_state_indices_tensor",
            "spec_query_start_loc",
            "num_accepted_tokens",
        )
        self.metadata = types.SimpleNamespace(
            num_spec_decodes=3, **dict(zip(names, more, strict=True))
        )

    tables = "state_indices", "cu_seqlens", "num_accepted_tokens"

    def layer(self, own) -> object:
        layers = sys.modules[vllm._LAYERS]
        layers.fused_mtp_decode_impl = lambda: own
        made = unmade(layers)
        vars(made).update(
            kv_cache=(None, self.x["state"]), A_log=self.x["A_log"],
            dt_bias=self.x["dt_bias"], head_k_dim=128, layer_norm_epsilon=1e-6,
            norm=types.SimpleNamespace(weight=self.x["norm_weight"], activation="silu"),
        )  # fmt: skip
        return made

    def call(self, made) -> torch.Tensor:
        names = "mixed_qkv", "b", "a", "output_gate"
        out = torch.zeros_like(self.x["output_gate"])
        made._forward_core_decode_spec_post_conv_fused_norm(
            **{name: self.x[name] for name in names},
            core_attn_out=out,
            attn_metadata=self.metadata,
        )
        return out


@VLLM
@pytest.mark.slow
def test_vllm_s_layer_takes_drafts_with_the_norm(release, engine):
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    ours, calls = engine
    ours.install()
    batch = Drafts(scale=128**-0.5)
    expected, states = layer_right(batch.x)
    before = batch.x["state"].clone()
    out = batch.call(batch.layer(sys.modules["vllm._custom_ops"].__dict__[DRAFTS]))
    assert steps.error(out, expected) < steps.OUTPUT
    for slot, state in enumerate(batch.x["state"]):
        right = states.get(slot)
        if right is None:
            assert steps.same(state, before[slot])
        else:
            assert steps.error(state, right) < 1e-5
    assert calls == [] and serving.fallbacks()["vllm"] == {}


@VLLMS
def test_drafts_that_stay_vllm_s_own(release, engine):
    ours, calls = engine
    ours.install()
    own = sys.modules["vllm._custom_ops"].__dict__[DRAFTS]
    batch = Drafts()
    batch.x["state"] = batch.x["state"].double()
    made = batch.layer(own)
    if release == "vllm 0.32.0":
        del sys.modules[vllm._LAYERS].fused_mtp_decode_impl
    batch.call(made)
    ((name, given),) = calls
    assert name == DRAFTS and serving.fallbacks()["vllm"] == {DRAFTS: 1}
    assert given[0] is batch.x["mixed_qkv"] and given[8] is batch.x["state"]
    assert [len(y) for y in given[5:8]] == [3, 4, 3]
    ours.uninstall()
    batch.call(made)
    assert len(calls) == 2 and serving.fallbacks()["vllm"] == {DRAFTS: 1}


class Whole:
    """A layer in vLLM's batch of decodes alone, before the convolution; a row more than decodes."""

    def __init__(self, dtype=torch.float32) -> None:
        self.x = decode_layer_call([3, 0, 1], 2, 6, "cpu", dtype, scale=128**-0.5)
        slots = torch.cat([self.x["state_indices"], torch.tensor([2]).int()])
        self.metadata = types.SimpleNamespace(
            num_actual_tokens=3, num_decodes=3, num_prefills=0, spec_sequence_masks=None,
            non_spec_state_indices_tensor=slots,
        )  # fmt: skip

    def layer(self, monkeypatch) -> object:
        layers = sys.modules[vllm._LAYERS]
        layers.is_conv_state_dim_first = lambda: True
        monkeypatch.setattr(vllm, "_metadata", lambda layer: self.metadata)
        x, made = self.x, unmade(layers)
        vars(made).update(
            kv_cache=(x["conv_state"], x["state"]), A_log=x["A_log"],
            dt_bias=x["dt_bias"], head_k_dim=128, layer_norm_epsilon=1e-6,
            conv1d=types.SimpleNamespace(weight=x["conv_weight"][:, None], bias=None),
            norm=types.SimpleNamespace(weight=x["norm_weight"], activation="silu"),
            enable_packed_recurrent_decode=True,
        )  # fmt: skip
        return made

    def call(self, made) -> torch.Tensor:
        names = "mixed_qkv", "b", "a", "output_gate"
        rows = {name: torch.cat([self.x[name], self.x[name][:1]]) for name in names}
        out = torch.zeros_like(rows["output_gate"])
        made._forward_core_fused_norm(**rows, core_attn_out=out)
        assert not out[3:].any()
        return out[:3]


@VLLM
def test_vllm_s_layer_decodes_in_one_call(release, engine, monkeypatch):
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    ours, calls = engine
    ours.install()
    batch = Whole()
    made = batch.layer(monkeypatch)

    def in_vllm(**x):
        out = batch.call(made)
        return out, x["state"], x["conv_state"]

    monkeypatch.setattr(serving, "layer_decode", in_vllm)
    assert decode_layer_faults(batch.x) == []
    assert calls == [] and serving.fallbacks()["vllm"] == {}


@VLLM
@pytest.mark.parametrize(
    "changed", [{"num_prefills": 1}, {"num_decodes": 0}, {"spec_sequence_masks": 1}]
)
def test_other_batches_are_not_decodes(release, engine, changed, monkeypatch):
    ours, calls = engine
    ours.install()
    batch = Whole()
    vars(batch.metadata).update(changed)
    batch.call(batch.layer(monkeypatch))
    assert [name for name, _ in calls] == ["_forward_core_fused_norm"]
    assert serving.fallbacks()["vllm"] == {}


@VLLM
def test_decodes_that_stay_vllm_s_own(release, engine, monkeypatch):
    ours, calls = engine
    ours.install()
    batch = Whole()
    batch.x["state"] = batch.x["state"].double()
    batch.call(made := batch.layer(monkeypatch))
    name = "_forward_core_fused_norm"
    assert [name for name, _ in calls] == [name]
    assert serving.fallbacks()["vllm"] == {f"QwenGatedDeltaNetAttention.{name}": 1}
    ours.uninstall()
    batch.call(made)
    assert len(calls) == 2 and sum(serving.fallbacks()["vllm"].values()) == 1


@VLLM
@pytest.mark.parametrize(
    "fused, changed",
    [
        (True, {}),
        (False, {"gqa_interleaved_layout": True}),
        (False, {"head_v_dim": 64}),
        (False, {"num_v_heads": 18}),
        (False, {"get_state_dtype": lambda: (torch.float32, torch.float32)}),
    ],
)
def test_which_layers_have_it(release, engine, fused, changed, monkeypatch):
    ours, _ = engine
    ours.install()
    layers = sys.modules[vllm._LAYERS]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    sizes = dict(
        head_k_dim=128, head_v_dim=128, conv_kernel_size=4, num_k_heads=2, num_v_heads=6,
        gqa_interleaved_layout=False, speculative_config=None,
        get_state_dtype=lambda: (torch.bfloat16, torch.float32),
        enable_fused_gdn_spec_decode=False,
    ) | changed  # fmt: skip
    monkeypatch.setattr(
        layers.QwenGatedDeltaNetAttention,
        "__init__",
        lambda self, *given: vars(self).update(sizes),
    )
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(dtype=torch.bfloat16)
    )
    made = layers.QwenGatedDeltaNetAttention.__new__(layers.QwenGatedDeltaNetAttention)
    made.__init__(None, config)
    assert made.enable_fused_gdn_spec_decode == fused


def prefill_call(lengths=(3, 0, 4), **changed) -> tuple[dict, list]:
    """vLLM's, with the recurrence's outputs and states: keys are normalised, gates given."""
    total, H, HV = sum(lengths), 2, 6
    x = steps.tokens(total, H, HV, "cpu")
    q, k = (
        torch.nn.functional.normalize(x[name].float(), dim=-1).bfloat16()
        for name in "qk"
    )
    g = -x["A_log"].exp() * torch.nn.functional.softplus(x["a"].float() + x["dt_bias"])
    state = steps.pool(len(lengths), HV, "cpu")
    ends = torch.tensor([0, *lengths]).cumsum(0)
    right = []
    for n in range(len(lengths)):
        part = [y[ends[n] : ends[n + 1]] for y in (q, k, x["v"], x["a"], x["b"])]
        gates = x["A_log"], x["dt_bias"]
        right.append(steps.walk(state[n], *part, *gates, 128**-0.5, norm=False))
    tokens = {"q": q, "k": k, "v": x["v"], "g": g, "beta": x["b"].float().sigmoid()}
    call = {name: y[None] for name, y in tokens.items()}
    rest = {"output_final_state": True, "use_qk_l2norm_in_kernel": False}
    return call | {
        "initial_state": state,
        "cu_seqlens": ends.int(),
    } | rest | changed, right


@VLLM
def test_vllm_s_prefill_is_ours(release, engine, monkeypatch):
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    ours, calls = engine
    ours.install()
    layers = sys.modules[vllm._LAYERS]
    own = layers.ChunkGatedDeltaRule

    def init(self):
        self._forward_method = self.forward_native

    monkeypatch.setattr(own, "__init__", init, raising=False)
    call, right = prefill_call()
    forward = own()._forward_method
    before = call["initial_state"].clone()
    out, state = forward(**call)
    assert out.shape == (1, 7, 6, 128) and out.dtype == torch.bfloat16
    expected = torch.cat([outputs for outputs, _ in right])
    assert steps.error(out[0], expected) < steps.OUTPUT
    last = [
        states[-1] if len(states) else s.double()
        for (_, states), s in zip(right, before, strict=True)
    ]
    assert steps.error(state, torch.stack(last)) < 1e-5 and calls == []
    assert forward(**call | {"core_attn_out": out}) == "own"
    assert serving.fallbacks()["vllm"] == {"chunk_gated_delta_rule": 1}


@VLLM
def test_vllm_s_update_is_set_in_the_layer_s_module(release, engine, stub):
    ours, calls = engine
    ours.install()
    ours.install()  # again: nothing more
    update = getattr(sys.modules[vllm._LAYERS], UPDATE)
    update(**verify_call(2, 2))
    assert [name for name, _ in stub] == ["mtp_verify"] and calls == []
    assert update(**verify_call(2, 2, is_kda=True)) == "own" and len(calls) == 1
    ours.uninstall()
    assert update(**verify_call(2, 2)) == "own" and len(stub) == 1


@VLLM
def test_a_name_that_another_plug_in_has_taken(release, engine, caplog):
    ours, _ = engine
    layers = sys.modules[vllm._LAYERS]
    registry = sys.modules["vllm.model_executor.custom_op"].PluggableLayer
    theirs = type("Theirs", (layers.QwenGatedDeltaNetAttention,), {})
    registry.register_oot("QwenGatedDeltaNetAttention")(theirs)
    assert len(ours.install()) == 2
    assert type(unmade(layers)) is theirs
    assert (
        "is not replaced: Duplicate layer name: QwenGatedDeltaNetAttention"
        in caplog.text
    )


# --- SGLang's hooks


@SGLANGS
def test_sglang_s_registry_puts_ours_around_its_functions(
    release, engine, stub, caplog
):
    ours, calls = engine
    assert ours.install() == [
        DECODE,
        UPDATE,
        sglang._PREFILL,
        f"layer ({sglang._LAYER})",
    ]
    home = sys.modules["sglang.kernels.ops.attention.fla.fused_recurrent"]
    decode = getattr(home, DECODE)
    x = decode_call()
    out, pool = decode(**x, use_qk_l2norm_in_kernel=True)
    assert out is x["out"] and pool is x["initial_state"] and not calls
    assert [n for n, _ in stub] == ["packed_decode"] and stub[0][1][12:] == (0, 1e-6)
    with caplog.at_level(logging.WARNING, "gdn.serving"):
        for _ in range(3):
            wide = torch.zeros(5, 6, 128, 128).double()
            assert decode(**decode_call(initial_state=wide)) == "own"
    assert len(calls) == 3 and len(stub) == 1
    assert ours.fallbacks == serving.fallbacks()["sglang"] == {DECODE: 3}
    told = [r.getMessage() for r in caplog.records if r.module == "client"]
    assert told == [
        f"{DECODE} falls back to sglang's own (1 call so far): packed_decode: no function for"
        " a pool of torch.float64; use float32, bfloat16 or float16"
    ]
    ours.uninstall()
    assert decode(**decode_call()) == "own" and ours.fallbacks == {DECODE: 3}


class Projections(types.SimpleNamespace):
    """What our layer asks of SGLang's: its projections of the hidden states are given."""

    def _forward_input_proj(self, hidden_states):
        return self.projected

    def out_proj(self, rows):
        return rows, None


def sglang_s_batch(linear: object, monkeypatch) -> None:
    """What get_attn_backend gives while SGLang runs a batch: `linear` is that of our layers."""
    context = types.ModuleType("sglang.srt.model_executor.forward_context")
    backend = types.SimpleNamespace(linear_attn_backend=linear)
    context.get_attn_backend = lambda: backend
    monkeypatch.setitem(sys.modules, context.__name__, context)


def sglang_layer(H: int, HV: int, slots: list[int], device: str) -> tuple:
    """(the layer, what get_attn_backend gives, the convolution's input and parameters)."""
    B, C = len(slots), (2 * H + HV) * 128
    x = steps.tokens(B, H, HV, "cpu")
    draw = torch.Generator().manual_seed(B)

    def randn(*shape):
        return torch.randn(*shape, generator=draw).bfloat16().to(device)

    tokens = torch.cat([x[name].flatten(1) for name in "qkv"], dim=1).to(device)
    gate, rings = randn(B, HV, 128), None
    attn = types.SimpleNamespace(
        layer_id=3, num_v_heads=HV, head_v_dim=128, head_k_dim=128, q_dim=H * 128, k_dim=H * 128, v_dim=HV * 128,
        conv_weights=randn(C, 4), bias=None, A_log=x["A_log"].to(device), dt_bias=x["dt_bias"].to(device),
    )  # fmt: skip
    norm = types.SimpleNamespace(weight=randn(128), eps=1e-5, activation="swish")
    projected = (
        torch.cat([tokens, gate.flatten(1)], dim=1),
        torch.cat([x["b"], x["a"]], dim=1).to(device),
    )
    caches = types.SimpleNamespace(
        conv=[randn(6, C, 3)], temporal=steps.pool(6, HV, device), replayssm_d=rings
    )
    tracked = []
    linear = types.SimpleNamespace(
        req_to_token_pool=types.SimpleNamespace(mamba2_layer_cache={3: caches}.get),
        forward_metadata=types.SimpleNamespace(
            mamba_cache_indices=torch.tensor(slots, dtype=torch.int32, device=device)
        ),
        _track_mamba_state_decode=lambda *args: tracked.append(args),
    )
    ours = Projections(attn=attn, norm=norm, projected=projected)
    return ours, linear, tokens, tracked


@SGLANGS
@steps.ON_BOTH
def test_sglang_s_layer_is_one_call_for_decodes(release, engine, device, monkeypatch):
    ours, calls = engine
    layer, linear, tokens, tracked = sglang_layer(2, 4, [2, -1, 4], device)
    sglang_s_batch(linear, monkeypatch)
    ours.install()
    batch = types.SimpleNamespace(
        forward_mode=types.SimpleNamespace(is_decode=lambda: True)
    )
    kind = pkgutil.resolve_name(f"{sglang._MODEL}:{sglang._LAYER}")
    cache = linear.req_to_token_pool.mamba2_layer_cache(3)
    before = cache.temporal.clone(), cache.conv[0].clone()
    attn, norm = layer.attn, layer.norm
    qkvz, ba = layer.projected
    right = steps.layer(
        tokens, ba[:, 4:], ba[:, :4], attn.A_log, attn.dt_bias, *before, linear.forward_metadata.mamba_cache_indices,
        128**-0.5, attn.conv_weights, None, (qkvz[:, 1024:].unflatten(1, (4, 128)), norm.weight, False, norm.eps),
    )  # fmt: skip
    got = kind(layer, torch.zeros(3, 64, device=device), batch)
    assert not calls and ours.fallbacks == {}
    assert steps.error(got.unflatten(1, (4, 128)), right.output) < 6e-3
    for slot, state in right.states.items():
        assert steps.error(cache.temporal[slot], state) < 2e-3
        assert torch.equal(cache.conv[0][slot].cpu(), right.windows[slot])
    assert steps.same(cache.temporal[[0, 1, 3, 5]], before[0][[0, 1, 3, 5]])
    ((given, conv, states, slots, number),) = tracked
    assert given is batch and conv is cache.conv[0] and states is cache.temporal
    assert number == 3 and slots is linear.forward_metadata.mamba_cache_indices
    # rows without a sequence, rings, and batches of other kinds are SGLang's own
    assert kind(layer, torch.zeros(4, 64, device=device), batch) == "own"
    cache.replayssm_d = before[0]
    assert kind(layer, torch.zeros(3, 64, device=device), batch) == "own"
    assert ours.fallbacks == {sglang._LAYER: 2}
    batch.forward_mode.is_decode = lambda: False
    assert kind(layer, torch.zeros(3, 64, device=device), batch) == "own"
    assert ours.fallbacks == {sglang._LAYER: 2} and len(calls) == 3


def sglang_prompts(lengths: list[int], slots: list[int], monkeypatch) -> tuple:
    """(a batch of prompts as SGLang prepares it, what it has of the batch)."""
    x = steps.tokens(sum(lengths), 2, 6, "cpu")
    q, k, v = (x[name][None] for name in "qkv")
    log_g = -torch.nn.functional.softplus(x["a"].float())
    metadata = types.SimpleNamespace(has_mamba_track_mask=False, track_ssm_h_src=None)
    sglang_s_batch(types.SimpleNamespace(forward_metadata=metadata), monkeypatch)
    call = dict(
        q=q, k=k, v=v, g=log_g[None], beta=x["b"].float().sigmoid()[None],
        initial_state=steps.pool(6, 6, "cpu"), head_first=False, use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.tensor(slots, dtype=torch.int32), inplace_update=True,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
    )  # fmt: skip
    return call, metadata


@SGLANGS
def test_sglang_s_prompts_go_to_its_pool(release, engine, monkeypatch):
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    ours, calls = engine
    ours.install()
    lengths, slots = [70, 3, 20], [2, 0, -1]
    call, metadata = sglang_prompts(lengths, slots, monkeypatch)
    before = call["initial_state"].clone()
    own = pkgutil.resolve_name(f"{sglang._OPS}.fla.chunk:{sglang._PREFILL}")
    out, last, within = own(**call)
    assert (last, within) == (None, None) and out.shape == call["v"].shape
    sequences = [
        steps.Sequence(2, slice(0, 70)),
        steps.Sequence(0, slice(70, 73)),
        steps.Sequence(-1, slice(73, 93)),
    ]
    x = {name: call[name][0] for name in "qkv"} | {"scale": 128**-0.5, "norm": True}
    x |= {"a": call["g"][0], "b": call["beta"][0], "A_log": None, "dt_bias": None}
    after = call["initial_state"]
    assert steps.faults(sequences, x, before, after, out[0], first_slot=0) == []
    assert not calls and ours.fallbacks == {}


@SGLANGS
def test_prompts_that_stay_sglang_s_own(release, engine, monkeypatch):
    ours, calls = engine
    ours.install()
    call, metadata = sglang_prompts([70], [2], monkeypatch)
    own = pkgutil.resolve_name(f"{sglang._OPS}.fla.chunk:{sglang._PREFILL}")
    before = call["initial_state"].clone()
    assert own(**call | {"inplace_update": False}) == "own"
    metadata.has_mamba_track_mask = True
    metadata.track_ssm_h_src = torch.tensor([1])
    assert own(**call) == "own"
    assert len(calls) == 2 and ours.fallbacks == {sglang._PREFILL: 2}
    assert steps.same(call["initial_state"], before)
    whole = sglang._attention_backend()
    del whole.forward_metadata
    assert own(**call) == "own" and ours.fallbacks == {sglang._PREFILL: 3}
    whole.forward_metadata = metadata
    # the next batch of the same sizes may want none
    if inventory.cxx():
        metadata.track_ssm_h_src = torch.tensor([], dtype=torch.int64)
        assert own(**call) != "own"


# --- plug-ins


@NEWEST
@pytest.mark.parametrize(
    "serve, listed, starts",
    [
        (None, None, False),
        ("1", None, True),
        ("0", None, False),
        (None, "other,gdn", True),
        (None, "gdn2", False),
        ("0", "gdn", False),
    ],
)
def test_a_plug_in_starts_only_where_it_is_asked_for(
    release, engine, serve, listed, starts, monkeypatch
):
    ours, _ = engine
    package = ours.CLIENT.package
    variables = {"GDN_SERVE": serve, f"{package.upper()}_PLUGINS": listed}
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    getattr(plugins, package)()
    assert ours.CLIENT.active == starts
    assert len(ours.CLIENT._replaced) == (len(ours.CLIENT.hooks) if starts else 0)


def test_a_plug_in_that_cannot_start_is_a_line_in_the_log(monkeypatch, caplog):
    """An error would end the engine."""

    def missing():
        raise MissingError("vllm: no such module", hint="install it")

    monkeypatch.setenv("GDN_SERVE", "1")
    monkeypatch.setattr(vllm.CLIENT, "install", missing)
    plugins.vllm()
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "vllm: gdn replaces nothing: vllm: no such module; install it"
    )


def test_the_entry_points_are_these_plug_ins():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text)["project"]["entry-points"]
    assert set(groups) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for group, entries in groups.items():
        entry = importlib.metadata.EntryPoint("gdn", entries["gdn"], group)
        assert entry.load() is getattr(plugins, group.partition(".")[0])


# --- fallbacks


class Calls:
    """An engine of one function, in whose place ours is called: what each of the two got."""

    def __init__(self) -> None:
        self.own: list[tuple] = []
        self.ours: list[tuple] = []
        self.refuses = lambda *args: None  # the error that ours raises
        self.client = Client("some_engine", "some-engine", ("1.",), [])
        self.client.active = True
        self.guarded = self.client.guarded("update", self.our_update)

    def own_update(self, x, initial_state, slots=None):
        self.own.append((x, initial_state, slots))
        return "own"

    def our_update(self, x, initial_state, slots=None):
        self.ours.append((x, initial_state, slots))
        if error := self.refuses(x, initial_state, slots):
            raise error
        return "ours"

    def __call__(self, *args, **named) -> str:
        return self.guarded(self.own_update, *args, **named)

    @property
    def counted(self) -> int:
        return self.client.fallbacks["update"]


@pytest.fixture
def calls(caplog):
    """Fallbacks are in the log."""
    caplog.set_level(logging.WARNING, "gdn.serving")
    yield Calls()
    del serving.client.FALLBACKS["some_engine"]


def lines(caplog) -> list[str]:
    prefix = "update falls back to some_engine's own "
    return [record.getMessage().removeprefix(prefix) for record in caplog.records]


def meta(*shape: int, **options) -> torch.Tensor:
    """A tensor that is not on a CPU, where nothing is remembered."""
    return torch.empty(*shape, device="meta", **options)


POOL = meta(5, 2, 128, 128)


def test_fallbacks_are_told_each_time_they_have_grown_tenfold(calls, caplog):
    calls.refuses = lambda x, pool, slots: ValueError(
        f"x: expected [2], got [{x.shape[0]}]"
    )
    for n in range(1, 1001):
        assert calls(meta(2 + n % 7), POOL) == "own"
    assert calls.counted == len(calls.own) == 1000
    assert lines(caplog) == [
        "(1 call so far): x: expected [2], got [3]",
        "(10 calls so far): x: expected [2], got [5]",
        "(100 calls so far): x: expected [2], got [4]",
        "(1000 calls so far): x: expected [2], got [8]",
    ]
    assert len(calls.ours) == 7  # each kind once


def test_each_reason_is_told_for_itself(calls, caplog):
    reasons = {None: "slots: expected some", 1: "x: expected more"}
    calls.refuses = lambda x, pool, slots: ValueError(reasons[slots])
    for slots in (None, 1, None, 1):
        calls(meta(2), POOL, slots)
    assert lines(caplog) == [
        f"(1 call so far): {reason}" for reason in reasons.values()
    ]
    assert calls.counted == 4


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_what_is_refused_is_not_tried_again(calls, error):
    calls.refuses = lambda x, *_: (
        None if x.is_contiguous() else error("x: expected contiguous")
    )
    for _ in range(3):
        assert calls(meta(4, 3).T, POOL) == "own"
    assert len(calls.ours) == 1 and len(calls.own) == calls.counted == 3
    assert calls(meta(3, 4), POOL) == "ours"


def test_a_library_that_does_not_build_is_asked_for_again(calls):
    """Not for good: `prepare` may have built it."""
    calls.refuses = lambda *args: GdnError("it does not build")
    for _ in range(2):
        assert calls(meta(2), POOL) == "own"
    assert len(calls.ours) == calls.counted == 2


KINDS = {
    "a gradient": lambda: meta(4, requires_grad=True),
    "another dtype": lambda: meta(4, dtype=torch.bfloat16),
    "another length": lambda: meta(5),
    "a list": lambda: [1, 2],
    "nothing": lambda: None,
}


@pytest.mark.parametrize("refused", KINDS)
def test_a_refusal_is_of_one_kind_of_call(calls, refused):
    """Others of the same strides are tried; an argument that has no hash is no fault."""
    other = KINDS[refused]()
    calls.refuses = lambda x, pool, slots: ValueError("x: no") if x is other else None
    assert calls(other, POOL) == "own"
    assert calls(meta(4), POOL) == "ours"
    assert calls(other, POOL) == "own" and len(calls.ours) == 2


def test_tensors_that_share_memory_are_another_kind_of_call():
    """As an output is that lies in the pool."""
    pool, apart = torch.zeros(2, 1, 128, 128), torch.zeros(128)
    shared, other, again = (
        _kind(x, {}) for x in ((pool[0, 0, 0], pool), (apart, pool), (apart, pool))
    )
    assert shared != other == again


def test_a_gradient_is_refused_only_where_gradients_are_taken(calls):
    refusal = ValueError("x: requires grad")
    calls.refuses = lambda *args: refusal if torch.is_grad_enabled() else None
    x = meta(4, requires_grad=True)
    assert calls(x, POOL) == "own"
    with torch.no_grad():
        assert calls(x, POOL) == "ours"


def test_on_a_cpu_a_refusal_may_be_of_values_and_is_not_remembered(calls):
    calls.refuses = lambda x, *_: ValueError("x: never falls") if x[0] > x[1] else None
    pool = torch.zeros(2, 1, 128, 128)
    assert calls(torch.tensor([2, 1]), pool) == "own"
    assert calls(torch.tensor([1, 2]), pool) == "ours"


def test_errors_that_may_come_after_a_launch_are_raised(calls, caplog):
    """The pool may have changed: the engine's function must not run on top of that."""
    calls.refuses = lambda *args: RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        calls(meta(2), POOL)
    assert calls.own == [] and calls.counted == 0 and lines(caplog) == []


# --- what the library gets


def verify_call(N: int, T: int, **changed) -> dict:
    """vLLM's: N sequences of T tokens, flat."""
    x = steps.tokens(N * T, 2, 6, "cpu")
    x |= {name: x[name][None] for name in "qkv"}
    return x | dict(
        initial_state=steps.pool(N * T + 1, 6, "cpu"), cu_seqlens=torch.arange(0, N * T + 1, T, dtype=torch.int32),
        ssm_state_indices=torch.arange(1, N * T + 1, dtype=torch.int32).view(N, T),
        num_accepted_tokens=torch.ones(N, dtype=torch.int32), use_qk_l2norm_in_kernel=True,
    ) | changed  # fmt: skip


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"is_kda": True}, "scalar gates"),
        ({"beta": 2.0}, "beta 1"),
        ({"threshold": 10.0}, "threshold 20"),
        ({"inplace_final_state": False}, "states in place"),
        ({"initial_state": None}, "expected a pool"),
        ({"ssm_state_indices": None}, "its slots"),
        (
            {"ssm_state_indices": torch.ones(2, dtype=torch.int32)},
            "sequences of one token",
        ),
    ],
)
def test_mtp_verify_refuses(stub, changed, says):
    with pytest.raises(ValueError, match=says):
        serving.mtp_verify(**verify_call(2, 2, **changed))
    assert stub == []


def sglang_call(N: int, T: int, **changed) -> dict:
    """SGLang's target_verify: the slots keep their states, the buffer gets one after each token."""
    x = steps.tokens(N * T, 2, 6, "cpu")
    x |= {name: x[name][None] for name in "qkv"}
    return x | dict(
        softplus_beta=1.0, softplus_threshold=20.0, initial_state_source=steps.pool(N + 2, 6, "cpu"),
        initial_state_indices=torch.arange(N, 0, -1).int(), use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, N * T + 1, T, dtype=torch.int32), disable_state_update=True,
        intermediate_states_buffer=torch.zeros(N + 1, T + 1, 6, 128, 128),
        intermediate_state_indices=torch.arange(N).int() + 1, cache_steps=T + 1,
    ) | changed  # fmt: skip


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"is_kda": True}, "scalar gates"),
        ({"lower_bound": -5.0}, "without a lower bound"),
        ({"cache_ring": True}, "without rings"),
        ({"retrieve_parent_token": torch.zeros(2, 2)}, "chain of drafts"),
        ({"disable_state_update": False}, "only with disable_state_update"),
    ],
)
def test_sglang_s_update_refuses(stub, changed, says):
    with pytest.raises(ValueError, match=says):
        sglang.update(**sglang_call(2, 2, **changed))
    assert stub == []


def test_chunk_prefill_s_arguments(stub):
    x = steps.tokens(5, 2, 6, "cpu")
    x |= {name: x[name][None] for name in "qkv"}
    x |= {
        "initial_state": steps.pool(4, 6, "cpu"),
        "ssm_state_indices": torch.tensor([3, 1]),
        "has_initial_state": torch.tensor([True, False]),
        "cu_seqlens": torch.tensor([0, 2, 5]),
    }
    out, _ = serving.chunk_prefill(**x, first_slot=0)
    ((_, args),) = stub
    assert [arg.shape for arg in args[:3]] == [(5, 2, 128), (5, 2, 128), (5, 6, 128)]
    rest = "initial_state", "ssm_state_indices", "has_initial_state", "cu_seqlens"
    for i, name in enumerate(rest, 7):
        assert args[i] is x[name]
    assert args[12] is out and out.shape == (5, 6, 128)
    assert (args[11], *args[13:]) == (None, 0, 1e-6)


# --- the library


class Built:
    """A kernel whose library has these functions."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def exported(self, name: str):
        return (lambda *_: name) if name in self.names else None


def test_threads_load_a_library_once(monkeypatch):
    loads, results, ready = [], [], threading.Barrier(8)

    def slow(name):
        loads.append(name)
        threading.Event().wait(0.05)
        return Built("f")

    monkeypatch.setattr(library, "_kernel", slow)
    exported = library.Exported("f", "op/rung")

    def call():
        ready.wait(10)
        results.append(exported[torch.float32, True]())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert loads == ["op/rung"] and results == ["f"] * 8


def test_names_by_dtype(monkeypatch):
    monkeypatch.setattr(library, "_kernel", lambda name: Built("f", "f_bf16"))
    exported = library.Exported("f", "op/rung")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert [exported[dtype, True]() for dtype in dtypes] == ["f", "f_bf16", "f"]


def test_a_missing_function_is_one_line_and_a_failed_build_is_not_repeated(monkeypatch):
    tries = []

    def fails(name):
        tries.append(name)
        raise GdnError("it does not build")

    monkeypatch.setattr(library, "_kernel", fails)
    exported = library.Exported("mtp_verify", "op/rung")
    monkeypatch.setattr(serving, "_verify", exported)
    for _ in range(3):
        with pytest.raises(GdnError, match="it does not build"):
            exported[torch.float32, True]
    assert len(tries) == 1
    monkeypatch.setattr(library, "_kernel", lambda name: Built())
    with pytest.raises(MissingError) as e:
        serving.prepare(serving.mtp_verify)  # it does try again
    assert str(e.value) == "op/rung: its library has no function mtp_verify; update gdn"


def test_no_library_is_loaded_during_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    exported = library.Exported("f", "op/rung")
    with pytest.raises(
        GdnError,
        match=r"while a CUDA graph is captured; call gdn.serving.prepare\(\)",
    ):
        exported[torch.float32, True]
    assert not exported.failed
    exported[torch.float32, True] = found = object()
    assert exported[torch.float32, True] is found


def test_what_a_cpu_has_no_function_for():
    with pytest.raises(
        MissingError, match="f: no function for .*CPU; move .* to a GPU"
    ):
        library.Exported("f", "op/rung")[KIND]


# --- beside the engines' own functions


VLLM_OPS = "vllm.third_party.flash_linear_attention.ops"
SGLANG_OPS = "sglang.kernels.ops.attention"
decode_of_sglang = functools.partial(serving.packed_decode, first_slot=0)
OWN = {
    ("vllm 0.33.0", "decode"): (
        f"{VLLM_OPS}.fused_recurrent:{DECODE}",
        serving.packed_decode,
    ),
    ("vllm 0.33.0", "verify"): (
        f"{VLLM_OPS}.fused_sigmoid_gating:{UPDATE}",
        serving.mtp_verify,
    ),
    ("sglang 0.5.23", "decode"): (
        f"{SGLANG_OPS}.fla.fused_recurrent:{DECODE}",
        decode_of_sglang,
    ),
    ("sglang 0.5.23", "verify"): (
        f"{SGLANG_OPS}.linear.fused_sigmoid_gating_recurrent:{UPDATE}",
        sglang.update,
    ),
}


def beside(release: str, of: str, device: str) -> str | list[str]:
    """Why it cannot be, or what differs. On a CPU this is for the process of the
    fixture `interpreter`.
    """
    engine = ENGINES[release].CLIENT
    try:
        path, ours = OWN[release, of]
        own = engine.own(path)
    except MissingError as e:
        return str(e)
    if device == "cuda" and not any(
        algo.full_name == serving._verify.cuda for algo in helpers.REGISTRY.algos
    ):
        return f"no {serving._verify.cuda} yet"
    # Triton's own, which the interpreter replaces only as tl.exp
    if device == "cpu" and "exp" in own.__globals__:
        own.__globals__["exp"] = lambda x: importlib.import_module(
            "triton.language"
        ).exp(x)
    if of == "decode":
        slots = torch.tensor([1, -1, 3], dtype=torch.int32)
        x = decode_call(use_qk_l2norm_in_kernel=True, ssm_state_indices=slots)
        if device == "cpu":  # the rung there takes slot 0 for padding
            ours = serving.packed_decode
    else:
        x = (
            verify_call(2, 2)
            if engine.package == "vllm"
            else sglang_call(2, 2, cache_steps=3)
        )
    x = {
        name: v.to(device) if isinstance(v, torch.Tensor) else v
        for name, v in x.items()
    }
    y = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in x.items()}
    result, expected = (
        z if isinstance(z, tuple) else (z,) for z in (ours(**y), own(**x))
    )
    names = ("initial_state", "initial_state_source", "intermediate_states_buffer")
    states = [(name, y[name], x[name]) for name in names if name in x]
    # outputs are rounded to bfloat16; SGLang's packed decode rounds beta to it
    limits = {"out": 8e-3} | dict.fromkeys(
        names, 1e-3 if release.startswith("sglang") and of == "decode" else 1e-5
    )
    found = [
        f"{name}: {e:.2g}"
        for name, got, right in [("out", result[0], expected[0]), *states]
        if got.shape != right.shape
        or not (e := steps.error(got, right.cpu().double())) <= limits[name]
    ]
    if of == "decode" and not steps.same(y["out"][1], x["out"][1]):
        found.append("padding")
    return found


@NEWEST
@pytest.mark.parametrize("of", ["decode", "verify"])
def test_the_engine_s_own_function_says_the_same(release, of, interpreter):
    """With the engine's files (shared/gpu/engines.sh) on PYTHONPATH."""
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    # before a process is started
    if importlib.util.find_spec(ENGINES[release].CLIENT.package) is None:
        pytest.skip(f"no {ENGINES[release].CLIENT.package} here")
    found = interpreter(beside, release, of, "cpu")
    if isinstance(found, str):
        pytest.skip(found)
    assert found == []


@pytest.mark.gpu
@NEWEST
@pytest.mark.parametrize("of", ["decode", "verify"])
def test_the_engine_s_own_function_says_the_same_on_a_gpu(release, of):
    if isinstance(found := beside(release, of, "cuda"), str):
        pytest.skip(found)
    assert found == []
