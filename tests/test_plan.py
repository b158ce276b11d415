"""Plans name, for each layer, whose selection it attends to."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_compile.errors import ConfigError
from dsa_compile.plan import Plan, plan_of

patterns = st.lists(st.booleans(), min_size=1, max_size=12).map(lambda rest: [True, *rest])


def letters(wanted, layers, **fields):
    return plan_of(wanted, [True] * layers, **fields).letters


@pytest.mark.parametrize(
    ("wanted", "row"),
    [
        (None, "FFFFFF"),
        ("own", "FFFFFF"),
        ("share:1/1", "FFFFFF"),
        ("share:1/2", "FFSFSF"),
        ("share:1/4", "FFSSSF"),
        ("share:FSSFSF", "FSSFSF"),
        ("mli", "FLLLLS"),
        ("mli+share:1/2", "FLSLSS"),
        (["own", "previous", "from:0", "own", "from:3", "dense"], "FSSFSD"),
        (["previous_step", "own", "from:0", "own", "own", "own"], "LFSFFF"),
    ],
)
def test_letters(wanted, row):
    assert letters(wanted, 6) == row


def test_mli_reads_the_indexer_before_and_a_shared_layer_the_nearest():
    assert plan_of("mli+share:FSFSF", [True] * 5).sources == (0, 0, 0, 2, 2)
    assert plan_of("mli", [True] * 4).sources == (0, 0, 1, 2)
    assert plan_of("mli", [True] * 4, layer0="dense").sources == (None, 0, 1, 2)


def test_the_first_layer_can_be_a_token_late():
    late, serial = (plan_of("mli", [True] * 4, layer0=layer0) for layer0 in ("previous_step", "serial"))
    assert (late.letters, late.sources, late.owners) == ("LLLS", serial.sources, serial.owners)
    assert late.text() == ("previous_step", "from:0", "from:1", "from:2")
    assert plan_of(late.text(), [True] * 4) == late != serial
    assert plan_of(["previous_step"], [True]).reuses


@pytest.mark.parametrize(("wanted", "rest"), [("mli", "S"), ("mli+share:FSSS", "SSS")])
def test_the_first_layer_need_not_wait_where_no_other_runs_an_indexer(wanted, rest):
    assert letters(wanted, len(rest) + 1, layer0="dense") == f"D{rest}"
    assert letters(wanted, len(rest) + 1, layer0="previous_step") == f"L{rest}"


def test_the_last_indexer_is_dropped_under_mli_where_nobody_reads_it():
    assert plan_of("mli", [True] * 4).owners == {0, 1, 2}
    assert plan_of("mli+share:FSFS", [True] * 4).owners == {0, 2}


@given(runs=patterns)
def test_sharing_and_mli_commute(runs):
    share = "share:" + "".join("FS"[not r] for r in runs)
    everywhere = [True] * len(runs)
    assert plan_of(f"{share}+mli", everywhere) == plan_of(f"mli+{share}", everywhere)
    assert plan_of("mli", runs) == plan_of(f"mli+{share}", everywhere)


@given(runs=patterns, mli=st.booleans())
def test_selections_come_from_layers_at_or_before_and_lists_read_back(runs, mli):
    plan = plan_of("mli" if mli else "own", runs)
    assert all(0 <= source <= layer for layer, source in enumerate(plan.sources))
    assert plan.owners <= {i for i, run in enumerate(runs) if run}
    assert plan_of(plan.text(), runs) == plan
    assert plan.reuses == (mli or not all(runs))


def test_published_schedules():
    glm = SimpleNamespace(index_topk_freq=4, index_skip_topk_offset=3)
    full = [i for i, letter in enumerate(letters("model", 78, model_config=glm)) if letter == "F"]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    assert len(full) == 21
    assert letters("share:1/4", 61).count("F") == 16
    assert [letters(f"share:1/{r}", 61).count("F") for r in (2, 4, 8, 16, 32)] == [31, 16, 9, 5, 3]
    assert [letters(f"share:1/{r}", 78).count("F") for r in (2, 4, 8, 16, 32)] == [40, 21, 11, 6, 4]


def test_an_offset_of_zero_is_an_offset():
    assert letters("share:1/4", 6, model_config=SimpleNamespace(index_skip_topk_offset=1)) == "FSSSFS"
    with pytest.raises(ConfigError, match="starts with a shared layer"):
        letters("share:1/4", 6, model_config=SimpleNamespace(index_skip_topk_offset=0))


def test_the_first_layers_before_the_offset_run_their_own():
    assert letters("model", 8, model_config=SimpleNamespace(index_topk_freq=4, index_skip_topk_offset=5)) == "FFFFFSSS"


def test_precedence_of_the_config():
    config = SimpleNamespace(
        index_topk_freq=2, index_topk_pattern="FSSS", indexer_types=["full", "full", "shared", "full"]
    )
    assert letters("model", 4, model_config=config) == "FFSF"
    config.indexer_types = None
    assert letters("model", 4, model_config=config) == "FSSS"
    config.index_topk_pattern = None
    assert letters("model", 4, model_config=config) == "FFSF"
    assert letters("model", 4, model_config=SimpleNamespace()) == "FFFF"


def test_layers_without_an_indexer_share_as_the_model_does():
    assert plan_of("own", [True, False, True, False]) == Plan((0, 0, 2, 2))
    assert plan_of("mli", [True, False, True, False]).letters == "FSLS"


@pytest.mark.parametrize(
    ("wanted", "fields", "words"),
    [
        ("shared", {}, "unknown 'shared'"),
        ("share", {}, "unknown 'share'"),
        ("mli:3", {}, "unknown 'mli:3'"),
        ("mli:", {}, "unknown 'mli:'"),
        ("model", {"model_config": SimpleNamespace(index_topk_pattern="FXSS")}, "came 'X' in 'FXSS'"),
        ("model", {"model_config": SimpleNamespace(indexer_types=["full"])}, "for each of 4 layers"),
        (
            "model",
            {"model_config": SimpleNamespace(indexer_types=["full", "half", "full", "full"])},
            "'full' or 'shared'",
        ),
        ("mli+mli", {}, "mli once"),
        ("share:1/2+share:1/4", {}, "at most one of own, share and model"),
        ("share:FXSS", {}, "came 'X' in 'FXSS'"),
        ("share:FSS", {}, "each of 4 layers, came 3"),
        ("share:SFFF", {}, "starts with a shared layer"),
        ("share:0/4", {}, r"in \(0, 1\], came '0/4'"),
        ("share:1/0", {}, r"in \(0, 1\], came '1/0'"),
        ("share:3/2", {}, r"in \(0, 1\], came '3/2'"),
        (["own"], {}, "each of 4 layers, came 1"),
        (["own", "from:2", "own", "own"], {}, "layer 1: expected a selection of this layer or an earlier one"),
        (["own", "from:-1", "own", "own"], {}, "layer 1: expected own, previous, from:j or dense"),
        (["own", "previous_step", "own", "own"], {}, "layer 1: expected own, previous, from:j or dense, came"),
        (["previous", "own", "own", "own"], {}, "layer 0 must own its selection"),
        ("own", {"layer0": "dense"}, "for plans with 'mli'"),
        ("own", {"layer0": "previous_step"}, "layer0='previous_step' is for plans with 'mli'"),
    ],
)
def test_bad_plans_are_named(wanted, fields, words):
    with pytest.raises(ConfigError, match=words):
        plan_of(wanted, [True] * 4, **fields)


@pytest.mark.parametrize(
    "wanted", ["share:FFFF", "share:1/1", ["own", "own", "own", "own"], ["own", "from:0", "from:1", "own"]]
)
def test_a_layer_without_an_indexer_lends_nothing(wanted):
    with pytest.raises(ConfigError, match=r"no indexer|which have none"):
        plan_of(wanted, [True, False, True, True])
