"""gdn_prefill/flashqla where FlashQLA is not: a stand-in takes the call as the package
documents it.
"""

import json
import textwrap

import helpers
import pytest

from gdn_cli.catalog import pack

REGISTRY = helpers.REGISTRY

# From the package's docstring, 0.1.3: batches, log g, V-first states where asked for,
# no empty sequences.
STAND_IN = textwrap.dedent("""
    import sys; sys.path.insert(0, {tests!r})
    import oracle, torch

    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                               use_qk_l2norm_in_kernel=False, cu_seqlens=None, state_v_first=False):
        assert q.shape[0] == 1 and g.dtype == beta.dtype == torch.float32 and not use_qk_l2norm_in_kernel
        lengths = cu_seqlens.diff().tolist()
        if not lengths or min(lengths) <= 0:
            raise ValueError(f"invalid sequence lengths: {{lengths}}")
        assert output_final_state and state_v_first and initial_state.shape[0] == len(lengths)
        # the oracle's gates that give these: log g = -exp(A_log) softplus(a), beta = sigmoid(b)
        a, b = (-g[0].double()).expm1().log(), (beta[0].double() / (1 - beta[0].double())).log()
        none = torch.zeros(v.shape[2])
        out, state = oracle.gdn_prefill(q[0], k[0], v[0], initial_state, none, a, none, b, cu_seqlens, scale)
        return torch.tensor(out).to(v.dtype)[None], torch.tensor(state).float()
""")
ASK = textwrap.dedent("""
    import json, sys; sys.path[:0] = [{folder!r}, {tests!r}]
    import oracle, torch
    from solution.main import run
    found = {{}}
    for lengths in ((3, 2), (0, 4, 0, 1), (0, 0)):
        inputs = oracle.inputs("gdn_prefill", lengths=lengths)
        exact = oracle.gdn_prefill(*inputs)
        found[str(lengths)] = [oracle.error(x, y) for x, y in zip(run(*inputs), exact)]
    print(json.dumps(found))
""")


@pytest.mark.slow
def test_the_call_matches_the_packages_signature(tmp_path):
    algo = REGISTRY.find("gdn_prefill/flashqla")
    (tmp_path / "solution").mkdir()
    for source in pack.pack(algo, REGISTRY.ops[algo.op])["sources"]:
        (tmp_path / "solution" / source["path"]).write_text(
            source["content"], encoding="utf-8"
        )
    names = dict(tests=str(helpers.TESTS), folder=str(tmp_path))
    (tmp_path / "flash_qla.py").write_text(STAND_IN.format(**names), encoding="utf-8")
    done = helpers.python("-c", ASK.format(**names), env={"TRITON_INTERPRET": "1"})
    assert done.code == 0, done.err[-2000:]
    found = json.loads(done.out)
    assert set(found) == {"(3, 2)", "(0, 4, 0, 1)", "(0, 0)"}
    assert all(output < 5e-3 and state < 1e-5 for output, state in found.values()), (
        found
    )
