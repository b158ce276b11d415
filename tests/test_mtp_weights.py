"""Where an MTP layer's weights come from, and what is refused."""

import copy
import json

import pytest
import torch
from cases import stock
from mtp import LAYERS, mtp_weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dsa_compile
from dsa_compile.errors import CheckpointError, ConfigError, MTPWeightsError, UnsupportedModelError
from dsa_compile.models.preparation import brings_mtp

V3, PREFIX = "deepseek_v3", f"model.layers.{LAYERS}."


def prepare(device, case=V3, **mtp):
    return dsa_compile.prepare(copy.deepcopy(stock(case, device, LAYERS)), selector="dense", mtp=mtp)


def layer_of(model):
    return {name: t for name, t in model.model.layers[LAYERS].state_dict().items() if ".indexer." not in name}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.cpu(), expected[name].cpu()), name


def apart(weights):
    """The tensors with experts in DeepSeek's names, one by one."""
    out = dict(weights)
    gates, downs = out.pop("mlp.experts.gate_up_proj"), out.pop("mlp.experts.down_proj")
    for expert, (both, down) in enumerate(zip(gates, downs)):
        gate, up = both.chunk(2)
        for kind, tensor in {"gate": gate, "up": up, "down": down}.items():
            out[f"mlp.experts.{expert}.{kind}_proj.weight"] = tensor
    return out


def files(tensors, folder, shards=1):
    """Safetensors files under ``folder``, with an index if there are several."""
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    names = [sorted(tensors)[n::shards] for n in range(shards)]
    places = {}
    for number, shard in enumerate(names):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in shard}, folder / file)
        places |= {name: file for name in shard}
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("experts", [dict, apart], ids=["fused", "apart"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_gives_its_layer_and_no_more_is_read(device, tmp_path, experts, shards):
    weights = mtp_weights(V3, device)
    shared = {"embed_tokens.weight": torch.full((2, 2), torch.nan), "shared_head.head.weight": torch.ones(3)}
    named = {PREFIX + name: t for name, t in experts(weights | shared if experts is dict else weights).items()}
    folder = files(named | {f"model.layers.{LAYERS - 1}.mlp.gate.weight": torch.ones(1)}, tmp_path, shards)
    if shards > 1:
        (folder / "model-9.safetensors").write_bytes(b"a file that the index does not name")
    assert_same(layer_of(prepare(device, module=folder)), weights)


def test_a_state_dict_and_a_module_give_the_same(device):
    weights = mtp_weights(V3, device)
    model = prepare(device, module=weights)
    assert_same(layer_of(model), weights)
    assert_same(layer_of(prepare(device, module=model.model.layers[LAYERS])), weights)
    assert_same(layer_of(prepare(device, module={PREFIX + name: t for name, t in apart(weights).items()})), weights)


def test_a_saved_model_brings_its_layer_along(device, tmp_path):
    model = prepare(device, module=mtp_weights(V3, device))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert len(again.model.layers) == LAYERS
    dsa_compile.prepare(again, selector="dense", mtp={})
    assert_same(layer_of(again), layer_of(model))


def test_the_layer_follows_the_model_in_dtype_but_for_what_stays_in_float32(device):
    model = copy.deepcopy(stock("deepseek_v32", device, LAYERS)).to(torch.bfloat16)
    model.model.layers[1].mlp.gate.e_score_correction_bias.data = torch.zeros(4, device=device)
    dsa_compile.prepare(model, mtp={"module": mtp_weights("deepseek_v32", device)})
    dtypes = {name: t.dtype for name, t in model.model.layers[LAYERS].state_dict().items()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {"mlp.gate.e_score_correction_bias"}


def test_tinyseek_brings_one(pytestconfig):
    checkpoint = pytestconfig.rootpath / "examples" / "tinyseek-4m"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    dsa_compile.prepare(model, selector="dense", mtp={})
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    stored = load_file(checkpoint / index["model.layers.6.eh_proj.weight"])
    assert torch.equal(model.model.layers[6].eh_proj.weight, stored["model.layers.6.eh_proj.weight"].float())
    assert len(model.make_cache(1, 8).layers) == 7


def bad(weights):
    fp8 = {"mlp.gate.weight_scale_inv": torch.ones(1, 1)}
    wide = {"eh_proj.weight": torch.zeros(64, 256)}
    lone = {name: t for name, t in apart(weights).items() if name != "mlp.experts.2.up_proj.weight"}
    return {
        "missing": (
            {n: t for n, t in weights.items() if n != "hnorm.weight"},
            rf"the MTP state dict: model\.layers\.{LAYERS}\.\*: the MTP layer lacks hnorm\.weight",
        ),
        "another hidden size": (weights | wide, r"eh_proj\.weight: expected shape \(64, 128\), came \(64, 256\)"),
        "fp8": (weights | fp8, r"holds fp8 weights \(mlp\.gate\.weight_scale_inv\); expected bfloat16"),
        "whole numbers": (weights | {"enorm.weight": torch.ones(64).int()}, r"enorm\.weight: expected floating-point"),
        "NaN": (weights | {"enorm.weight": torch.full((64,), torch.nan)}, r"enorm\.weight holds NaN or inf"),
        "an expert's half": (lone, r"experts lack 2\.up_proj"),
        "nothing": ({}, "the MTP layer lacks eh_proj.weight, enorm.weight"),
    }


@pytest.mark.parametrize(
    "kind", bad({"mlp.experts.gate_up_proj": torch.ones(4, 2, 1), "mlp.experts.down_proj": torch.ones(4, 1)})
)
def test_weights_that_do_not_fit_are_refused(device, kind):
    weights, text = bad(mtp_weights(V3, device))[kind]
    model = copy.deepcopy(stock(V3, device, LAYERS))
    with pytest.raises(MTPWeightsError, match=text):
        dsa_compile.prepare(model, selector="dense", mtp={"module": weights})
    assert type(model) is type(stock(V3, device))
    assert len(model.model.layers) == LAYERS


def test_sources_without_an_mtp_layer_say_what_was_looked_for(device, tmp_path):
    files({"model.norm.weight": torch.ones(2)}, tmp_path)
    with pytest.raises(MTPWeightsError, match=rf"{tmp_path}: holds no tensors model\.layers\.{LAYERS}\.\*.*module="):
        prepare(device, module=tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a checkpoint folder with \*\.safetensors.*came '\.'"):
        prepare(device)
    with pytest.raises(CheckpointError, match="nowhere"):
        prepare(device, module=tmp_path / "nowhere")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json: expected JSON with a weight_map"):
        prepare(device, module=tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"broken\.safetensors: cannot be read as a safetensors file"):
        prepare(device, module=tmp_path / "broken.safetensors")


def test_whether_a_checkpoint_brings_an_mtp_layer_is_seen_in_its_files(device, tmp_path):
    model = copy.deepcopy(stock(V3, device, LAYERS))
    assert not brings_mtp(model)
    model.config.name_or_path = str(tmp_path)
    assert not brings_mtp(model)
    files({"model.norm.weight": torch.ones(2)}, tmp_path)
    assert not brings_mtp(model)
    files({PREFIX + "hnorm.weight": torch.ones(2), "model.norm.weight": torch.ones(2)}, tmp_path, shards=2)
    assert brings_mtp(model)
    without = copy.deepcopy(stock("deepseek_v2", device, LAYERS))
    without.config.name_or_path = str(tmp_path)
    assert not brings_mtp(without)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-0.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors: cannot be read as a safetensors file"):
        brings_mtp(model)


def test_families_without_an_mtp_layer_are_refused(device):
    with pytest.raises(UnsupportedModelError, match=r"DeepseekV2ForCausalLM: mtp= needs.*deepseek_v2 do not\. Leave"):
        prepare(device, "deepseek_v2")


@pytest.mark.parametrize("plan", [None, ["own", "from:0"]])
def test_an_indexer_for_all_layers_but_the_mtp_layer_is_refused(device, plan):
    weights = {
        name: t
        for name, t in dsa_compile.prepare(
            copy.deepcopy(stock(V3, device, LAYERS)), indexer="random", index_n_heads=4, index_head_dim=16
        )
        .state_dict()
        .items()
        if ".indexer." in name
    }
    with pytest.raises(
        dsa_compile.errors.IndexerWeightsError, match=rf"none for layers \[{LAYERS}\]\. .* \(that of mtp= included\)"
    ):
        dsa_compile.prepare(
            copy.deepcopy(stock(V3, device, LAYERS)),
            indexer=weights,
            plan=plan,
            mtp={"module": mtp_weights(V3, device)},
        )


def test_other_indexers_of_a_model_that_brings_its_own_reach_the_mtp_layer_where_they_are_of_it(device):
    case, weights = "deepseek_v32", mtp_weights("deepseek_v32", device)
    given = {name: t + 1 for name, t in stock(case, device, LAYERS + 1).state_dict().items() if ".indexer." in name}
    without = {name: t for name, t in given.items() if not name.startswith(PREFIX)}
    for indexer, moved in ((given, 1), (without, 0)):
        model = copy.deepcopy(stock(case, device, LAYERS))
        layer = dsa_compile.prepare(model, indexer=indexer, mtp={"module": weights}).model.layers[LAYERS]
        for name, tensor in layer.self_attn.indexer.named_parameters():
            assert torch.equal(tensor, weights[f"self_attn.indexer.{name}"] + moved)


@pytest.mark.parametrize(
    ("mtp", "text"),
    [
        ({"drafts": -1}, r"MTPConfig\.drafts: expected a whole number of at least 1, or 'auto', came -1"),
        ({"drafts": 0}, r"MTPConfig\.drafts: expected a whole number of at least 1, or 'auto', came 0"),
        ({"drafts": 17}, r"MTPConfig\.drafts: expected at most 16, as each is one more run .* came 17\."),
        ({"drafts": 1.5}, r"MTPConfig\.drafts: expected a whole number of at least 1, or 'auto', came 1\.5"),
        ({"share_selection": "yes"}, r"MTPConfig\.share_selection: expected one of None, False, True, came 'yes'"),
        ({"draft": 1}, r"MTPConfig: unknown option 'draft'; did you mean 'drafts'"),
        (2, "mtp: expected MTPConfig or a dict of its fields, came int"),
    ],
)
def test_options_out_of_range_are_refused(mtp, text):
    with pytest.raises(ConfigError, match=text):
        dsa_compile.DSAConfig(mtp=mtp)
