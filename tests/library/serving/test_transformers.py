"""transformers' own model with our layer in it, by `kernels`, on a CPU (with transformers 5.21 and
kernels 0.17 on PYTHONPATH): tokens, logits and the states in its cache are those of the stock model.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

import pytest
import serving_steps as steps
import torch

from gdn.serving import transformers as on_gdn
from gdn_cli.errors import GdnError
from gdn_cli.machine import inventory

FULL = dict(do_sample=False, max_new_tokens=12, pad_token_id=0)
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "left padding": {"attention_mask": torch.tensor([[0] * 9 + [1] * 12, [1] * 21])},
    "a static cache": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.fixture(scope="module")
def hf():
    os.environ["HF_HUB_OFFLINE"] = "1"
    for package in ("transformers", "kernels"):
        pytest.importorskip(
            package, reason=f"no {package} here: pip install '.[clients]'"
        )
    if importlib.util.find_spec("fla"):
        pytest.skip("with fla transformers' own functions need a GPU")
    if not inventory.cxx():
        pytest.skip("no C++ compiler here")
    return importlib.import_module("transformers")


@pytest.fixture(autouse=True)
def counted():
    """Each test counts from 0."""
    on_gdn.fallbacks.clear()


def model(hf, kind: str = "Qwen3_5", dtype=torch.bfloat16, **changed):
    """Of 4 layers, 3 with GDN. The embeddings are large beside what the layers add: so two tokens
    are not nearly as likely by chance."""
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, vocab_size=128, linear_num_key_heads=2,
        linear_num_value_heads=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    config = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3Next": "Qwen3NextConfig"}[kind]
    made = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, config)(**sizes | changed))
    with torch.no_grad():
        made.model.embed_tokens.weight.mul_(10)
        for each in made.model.layers[:3]:
            each.linear_attn.A_log.fill_(-3.0)  # forgets slowly: padding would be seen
    return made.to(dtype).eval()


def prompt() -> torch.Tensor:
    return torch.randint(1, 128, (2, 21), generator=torch.Generator().manual_seed(1))


def states(cache) -> torch.Tensor:
    """Of all GDN layers, [B, HV, K, V] each."""
    layers = [each.recurrent_states[0] for each in cache.layers[:3]]
    return torch.stack(layers)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_says_the_same(hf, way):
    options = FULL | WAYS[way]
    told = dict(return_dict_in_generate=True, output_logits=True)
    expected, got = (
        each.generate(prompt(), **options, **told)
        for each in (model(hf), on_gdn.kernelize(model(hf)))
    )
    assert torch.equal(got.sequences, expected.sequences)
    assert not on_gdn.fallbacks
    if way == "beams":  # those that lose may lie in another order
        return
    for ours, own in zip(got.logits, expected.logits, strict=True):
        assert steps.error(ours, own.double()) < 4e-3
    ours, own = states(got.past_key_values), states(expected.past_key_values)
    # transformers rounds beta to bfloat16
    assert steps.error(ours, own.double()) < 1e-2
    assert steps.error(ours.mT, own.double()) > 0.5


def test_a_model_in_float16(hf):
    def cached(model):
        with torch.no_grad():
            first = model(prompt(), use_cache=True)
            return model(prompt()[:, :1], past_key_values=first.past_key_values)

    own = model(hf, dtype=torch.float16)
    ours = on_gdn.kernelize(model(hf, dtype=torch.float16))
    expected, got = cached(own).logits, cached(ours).logits
    assert got.dtype == torch.float16 and not on_gdn.fallbacks
    assert steps.error(got, expected.double()) < 1e-3


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize(
    "first, second", [("own", "ours"), ("ours", "own"), ("ours", "ours")]
)
def test_either_layer_goes_on_with_the_other_s_state(hf, first, second, reordered):
    """And after a beam search has reordered the cache, which makes our view of the state dense."""
    models = {"own": model(hf), "ours": on_gdn.kernelize(model(hf))}

    def run(first: str, second: str):
        with torch.no_grad():
            cache = models[first](prompt(), use_cache=True).past_key_values
            if reordered:
                cache.reorder_cache(torch.tensor([1, 0]))
            kept = cache.layers[0].recurrent_states[0]
            address, in_place = kept.data_ptr(), kept.mT.is_contiguous()
            logits = models[second](prompt()[:, :1], past_key_values=cache).logits
        assert cache.layers[0].recurrent_states[0].data_ptr() == address
        assert in_place == (first == "ours" and not reordered)
        return logits, states(cache)

    logits, right = run("own", "own")
    got_logits, got = run(first, second)
    assert steps.error(got_logits, logits.double()) < 4e-3
    assert steps.error(got, right.double()) < 1e-2
    assert not on_gdn.fallbacks


def test_a_prompt_in_two_parts(hf):
    own, ours = model(hf), on_gdn.kernelize(model(hf))
    tokens = prompt()
    results = []
    for each in (own, ours):
        with torch.no_grad():
            cache = each(tokens[:, :9], use_cache=True).past_key_values
            each(tokens[:, 9:], past_key_values=cache)
            results.append(states(cache))
    assert steps.error(results[1], results[0].double()) < 1e-2
    assert not on_gdn.fallbacks


def test_the_functions_of_another_model(hf, monkeypatch):
    """Qwen3-Next has no hook of the layer."""
    sizes = dict(num_experts=2, num_experts_per_tok=2, moe_intermediate_size=32)
    own = model(hf, "Qwen3Next", **sizes, shared_expert_intermediate_size=32)
    calls = Counter()

    def counted(function):
        def counting(*args, **named):
            calls[function.__name__] += 1
            return function(*args, **named)

        return counting

    for function in (on_gdn.prefill, on_gdn.step):
        monkeypatch.setattr(on_gdn, function.__name__, counted(function))
    expected = own.generate(prompt(), **FULL)
    with torch.no_grad():
        logits = own(prompt()).logits
        assert not calls
        got = on_gdn.kernelize(own)(prompt()).logits
    assert steps.error(got, logits.double()) < 4e-3 and calls == {"prefill": 3}
    assert torch.equal(own.generate(prompt(), **FULL), expected)
    assert calls == {"prefill": 2 * 3, "step": 11 * 3} and not on_gdn.fallbacks


REFUSED = {
    "float32": (
        dict(dtype=torch.float32),
        "expected bfloat16 or float16, got torch.float32",
    ),
    "heads of 64": (dict(linear_value_head_dim=64), "got K = 128, V = 64"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_model_runs_as_before(hf, what, caplog):
    changed, says = REFUSED[what]
    own, ours = model(hf, **changed), on_gdn.kernelize(model(hf, **changed))
    with torch.no_grad():
        assert torch.equal(own(prompt()).logits, ours(prompt()).logits)
    assert on_gdn.fallbacks == {"Qwen3_5GatedDeltaNet": 3} and says in caplog.text


def test_a_gradient_is_the_model_s_own(hf, caplog):
    ours = on_gdn.kernelize(model(hf))
    ours(prompt()).logits.sum().backward()
    assert ours.model.layers[0].linear_attn.A_log.grad.abs().sum() > 0
    assert "a gradient is wanted" in caplog.text
    assert "call the model under torch.no_grad()" in caplog.text
    assert on_gdn.fallbacks == {"Qwen3_5GatedDeltaNet": 3}


def test_an_error_after_the_convolution_is_not_hidden(hf, monkeypatch):
    """The model's own layer would convolve a second time."""
    ours = on_gdn.kernelize(model(hf))

    def fails(*args, **named):
        raise ValueError("q: expected another")

    monkeypatch.setattr(on_gdn, "prefill", fails)
    with torch.no_grad(), pytest.raises(RuntimeError, match="the cache cannot be used"):
        ours(prompt())


def test_another_signature_is_refused(hf, monkeypatch, capsys):
    modeling = importlib.import_module(on_gdn._MODELING)

    def forward(self, hidden_states, states=None, attention_mask=None, **kwargs): ...

    monkeypatch.setattr(modeling.Qwen3_5GatedDeltaNet, "forward", forward)
    assert on_gdn.CLIENT.main() == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert "Qwen3_5GatedDeltaNet stays as it is: " in line and "states=None" in line
    assert "cache_params=None" in line and "cache=None" in line


@pytest.mark.parametrize(
    "version, known", [("5.24.0", True), ("5.25.0", False), ("4.57.1", False)]
)
def test_versions(hf, version, known, monkeypatch):
    monkeypatch.setattr(on_gdn.CLIENT, "_version", lambda: version)
    why = on_gdn.check()["chunk_gated_delta_rule"]
    assert why is None if known else f"version {version}, known is 5.21.x or" in why


def test_5_24_s_argument_is_the_cache(hf):
    """Passed by its newer name, by which 5.21's layer would not see it."""
    ours = on_gdn.kernelize(model(hf)).model.layers[0].linear_attn
    cache = hf.DynamicCache(config=model(hf).config)
    hidden = torch.randn(2, 5, 64).bfloat16()
    with torch.no_grad():
        ours.forward(hidden_states=hidden, cache=cache)
    assert cache.layers[0].recurrent_states[0].shape == (2, 4, 128, 128)


def test_a_model_without_gated_delta_net(hf):
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=8)
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=1))
    with pytest.raises(GdnError, match="LlamaForCausalLM has none of our hooks"):
        on_gdn.kernelize(llama)


def test_without_the_package_kernels(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(on_gdn.importlib, "import_module", missing)
    with pytest.raises(GdnError, match="No module named 'kernels'; pip install"):
        on_gdn.mapping()
