"""The passes together: random models, single passes disabled, the key that caches see."""

import copy
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from graphs import BUDGET
from harness import capture
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import indexer_dims, lengths, seeds

import dsa_compile
from dsa_compile import backend
from dsa_compile.backend import cache_key
from dsa_compile.config import DSAConfig
from dsa_compile.errors import ConfigError
from dsa_compile.models.miniature import miniature
from dsa_compile.passes.pipeline import PIPELINE, op_counts, rewrite

TOPK = 8
NAMES = [p.name for p in PIPELINE]
MLA, SPARSE, PREFILL, SELECT, EXACT = (
    f"dsa.{name}.default" for name in ("mla", "sparse_mla", "prefill_mla", "select", "select_attention")
)


@st.composite
def model_sizes(draw):
    """Fields of a small model's config, without experts: those have no float64."""
    heads = draw(st.sampled_from([1, 2, 3]))
    rope = draw(st.sampled_from([2, 4]))
    return {
        "num_hidden_layers": draw(st.integers(1, 2)),
        "first_k_dense_replace": 2,
        "hidden_size": 24,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": draw(st.sampled_from([4, 9])),
        "q_lora_rank": draw(st.sampled_from([None, 12])),
        "qk_rope_head_dim": rope,
        "head_dim": rope,
        "qk_nope_head_dim": draw(st.sampled_from([3, 8])),
        "v_head_dim": draw(st.sampled_from([5, 8])),
    }


def padded(batch, length, holes, seed, device):
    """Tokens, and the mask and positions of sequences that are padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : min(holes[row], length - 1)] = 0
    return {
        "input_ids": ids.to(device),
        "attention_mask": mask.to(device),
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0).to(device),
    }


@settings(max_examples=8)
@given(
    data=st.data(),
    family=st.sampled_from(["deepseek_v2", "deepseek_v3"]),
    sizes=model_sizes(),
    length=lengths(TOPK),
    seed=seeds,
    selector=st.sampled_from(["attention", "indexer"]),
    cached=st.booleans(),
)
def test_a_selection_of_everything_gives_what_dense_gives(device, data, family, sizes, length, seed, selector, cached):
    batch = data.draw(st.integers(1, 3), label="B")
    holes = data.draw(st.lists(st.integers(0, TOPK), min_size=batch, max_size=batch), label="left padding")
    topk = length + data.draw(st.sampled_from([0, 1, 5]), label="K - length")
    fields = {"selector": "attention"}
    if selector == "indexer":
        drawn = data.draw(indexer_dims(), label="indexer")
        fields = {"indexer": "random", "index_n_heads": drawn.n_heads, "index_head_dim": drawn.head_dim}
    stock = miniature(family, seed=seed % 1000, dtype=torch.float64, **sizes).to(device)
    dense = miniature(family, seed=seed % 1000, dtype=torch.float64, **sizes).to(device)
    model = dsa_compile.optimize(dense, lowering="eager", index_topk=topk, **fields)
    inputs = padded(batch, length, holes, seed, device)
    tokens = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = stock(**inputs, use_cache=False).logits[tokens]
        ours = model(**inputs, use_cache=cached).logits[tokens]
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=0)
    (used,) = {e.reason.split()[0] for e in dsa_compile.recent_reports()[-1].of("insert_indexer", matched=True)}
    assert used == ("dsa::select_attention" if selector == "attention" else "dsa::select")


@pytest.fixture(scope="module")
def captured(device):
    """Graphs of a call without a cache and of one decoding step, of a model with indexers; inputs longer than K."""
    model = miniature("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2, dtype=torch.float64).to(device)
    dsa_compile.prepare(
        model, indexer="random", index_n_heads=4, index_head_dim=12, index_topk=TOPK, select_budget=BUDGET
    )
    inputs = padded(2, 3 * TOPK, [0, 3], 1, device)
    prefill = capture(model, **inputs, use_cache=False)
    cache = model.make_cache(2, 64)
    model(**inputs, past_key_values=cache)
    return prefill, capture(model, inputs["input_ids"][:, :1], past_key_values=cache)


def rewritten(graph, **fields):
    """Outputs, dsa:: ops and report of a copy of ``graph`` that went through the pipeline."""
    twin = copy.deepcopy(graph)
    report = rewrite(twin.gm, DSAConfig(select_budget=BUDGET, **fields))
    counts = {op: n for op, n in op_counts(twin.gm).items() if op.startswith("dsa.")}
    return torch.utils._pytree.tree_leaves(twin.run()[0])[0], counts, report


def test_every_layer_is_sparse(captured):
    prefill, step = captured
    assert rewritten(prefill)[1] == {SELECT: 2, PREFILL: 2}
    assert rewritten(prefill, prefill="sparse")[1] == {SELECT: 2, SPARSE: 2}
    assert rewritten(prefill, prefill="dense")[1] == {PREFILL: 2}
    assert rewritten(step)[1] == {SELECT: 2, SPARSE: 2, "dsa.cache_write.default": 2}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "step"])
def test_a_pass_that_is_disabled_is_left_out_and_the_rest_is_right(captured, which):
    graph, sparse = captured[which], rewritten(captured[which])[0]
    before = torch.utils._pytree.tree_leaves(graph.run()[0])[0]
    assert (sparse - before).abs().max() > 1e-3

    outputs, counts, report = rewritten(graph, disable_passes=("insert_indexer",))
    close(outputs, before)
    assert SELECT not in counts
    assert counts[PREFILL if which == 0 else SPARSE] == 2
    assert "insert_indexer: disabled" in report.notes

    outputs, counts, _ = rewritten(graph, disable_passes=("sparsify",))
    close(outputs, sparse)
    assert (counts[MLA if which else PREFILL], counts[SELECT], SPARSE in counts) == (2, 2, False)

    for name in set(NAMES) - {"insert_indexer", "sparsify"}:
        close(rewritten(graph, disable_passes=(name,))[0], sparse)

    outputs, counts, report = rewritten(graph, disable_passes=tuple(NAMES))
    assert torch.equal(outputs, before)
    assert (counts[MLA], report.entries) == (2, [])


def test_the_exact_selector_replaces_no_attached_indexer(captured):
    _, counts, _ = rewritten(captured[0], selector="attention")
    assert (counts[SELECT], EXACT in counts) == (2, False)


def test_an_unknown_pass_is_named_with_the_nearest():
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(ConfigError, match="unknown pass 'sparsfy'; did you mean 'sparsify'"):
        rewrite(graph, DSAConfig(disable_passes=("sparsfy",)))
    with pytest.raises(ConfigError, match=r"unknown pass 'x'; the passes are .*insert_indexer"):
        rewrite(graph, DSAConfig(disable_passes=("x",)))


def test_names_differ():
    assert len(set(NAMES)) == len(NAMES)
    assert all(p.numerics in ("exact", "changes") for p in PIPELINE)


def test_the_report_counts_operators(captured):
    report = rewritten(captured[0])[2]
    assert report.op_changes("insert_indexer")[SELECT] == 2
    assert report.op_changes("choose_form")[PREFILL] == 2
    assert report.op_changes("absorb_mla") == {}
    assert [e.where for e in report.of("choose_form", matched=True)] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]


CHANGES = {
    "index_topk": 7,
    "selector": "dense",
    "plan": "mli",
    "layer0": "dense",
    "prefill": "masked",
    "select_budget": 12345,
    "prefill_budget": 12345,
    "lowering": "eager",
    "mode": "max-autotune",
    "disable_passes": ("sparsify",),
    "indexer": "random",
    "index_n_heads": 3,
    "index_head_dim": 24,
    "mtp": {"drafts": 2, "share_selection": True},
    "cache": {"capacity": 7, "dtype": "fp8", "index_dtype": "fp8", "rotate_index": True},
}


def test_the_key_differs_where_an_option_shapes_the_graph():
    fields = {f.name for f in dataclasses.fields(DSAConfig)}
    assert fields >= set(CHANGES) >= set(DSAConfig().graph_options())
    key = cache_key(DSAConfig())
    assert key == cache_key(DSAConfig())
    for name, value in CHANGES.items():
        differs = cache_key(DSAConfig(**{name: value})) != key
        assert differs == (name in DSAConfig().graph_options()), name


@pytest.mark.parametrize("folder", ["passes", "lowering"])
def test_the_key_differs_where_a_source_differs(tmp_path, monkeypatch, folder):
    def key_of(name, change):
        root = tmp_path / name
        for each in ("passes", "lowering"):
            shutil.copytree(source / each, root / each, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(source / "compat.py", root)
        change(root / folder)
        monkeypatch.setattr(backend.dsa_compile, "__file__", str(root / "__init__.py"))
        return cache_key(DSAConfig())

    source = Path(dsa_compile.__file__).parent
    deepest = max((source / folder).rglob("*.py"), key=lambda p: len(p.parts)).relative_to(source / folder)
    same = key_of("same", lambda root: (root / "notes.txt").write_text("no source"))
    assert same == key_of("copy", lambda root: None)
    assert same != key_of("edited", lambda root: (root / deepest).open("a").write("\n"))
    assert same != key_of("added", lambda root: (root / "kernel.py.jinja").write_text("{{ x }}"))
