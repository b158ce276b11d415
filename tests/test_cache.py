"""The cache against lists of rows: whatever is done to it, it holds what was appended and not removed."""

import copy
import pickle

import pytest
import torch
from cases import V32
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsa_compile import lowering  # noqa: F401 (registers the ops)
from dsa_compile.cache import DSACache, check_fp8_device, slots_and_visible
from dsa_compile.dims import IndexerDims, LayerDims
from dsa_compile.errors import CacheCapacityError, CacheError
from dsa_compile.lowering.fp8_keys import decode, quantise
from dsa_compile.lowering.fp8_rows import unpack

PLAIN = LayerDims(n_heads=2, kv_lora_rank=3, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
INDEXED = LayerDims(**{**vars(PLAIN), "indexer": IndexerDims(n_heads=2, head_dim=16)})
KEEPING = LayerDims(**{**vars(INDEXED), "kept_topk": 1})
DIMS = (KEEPING, PLAIN)
CAPACITY = 24


def make(device, batch_size=2, capacity=CAPACITY, dtype=torch.float32, fp8_keys=False):
    sizes = {"batch_size": batch_size, "capacity": capacity, "dtype": dtype}
    return DSACache(DIMS, device=device, fp8_keys=fp8_keys, **sizes)


def append(cache, numbers, valid):
    """What a model's call does: row (b, t) holds ``numbers[b, t]`` everywhere, negated in the index keys.

    The selection that the first layer keeps is the number of the last token.
    """
    slots, _ = cache.plan(valid)
    cache.lengths.slots = slots
    rows = numbers.to(cache.device, cache.dtype)[..., None]
    for layer, dims in enumerate(cache.dims):
        cache.update(rows.expand(-1, -1, 3)[:, None], rows.expand(-1, -1, 2)[:, None], layer)
        if dims.indexer:
            cache.update_indexer(-rows.expand(-1, -1, dims.indexer.head_dim), layer)
    torch.ops.dsa.keep_selection(cache.layers[0].kept, slots, rows.nan_to_num().int(), True)
    cache.lengths.slots = None
    cache.commit(valid)


def stored(cache):
    """The numbers of each sequence, after checking that all pools of every layer hold the same.

    What is kept is of the last token of each, or is said not to be.
    """
    lengths = cache.lengths.valid.tolist()
    rows = [cache.layers[0].latent[b, :n, 0].tolist() for b, n in enumerate(lengths)]
    for layer in cache.layers:
        for b, n in enumerate(lengths):
            want = torch.tensor(rows[b], dtype=cache.dtype, device=layer.latent.device)[:, None]
            assert torch.equal(layer.latent[b, :n], want.expand(n, 5))
            keys = -want.expand(n, layer.index_keys.shape[2])
            _, found, *scales = [pool[b, :n] for pool in layer.pools().values()]
            for one, two in zip((found, *scales), quantise(keys) if scales else (keys,), strict=True):
                assert torch.equal(one, two)
    if cache.lengths.current:
        assert [kept for [kept], row in zip(cache.layers[0].kept.tolist(), rows) if row] == [r[-1] for r in rows if r]
    return rows


def addresses(cache):
    return [pool.data_ptr() for layer in cache.layers for pool in layer.pools().values()]


def filled(device, **arguments):
    """Sequences [0, 1, 2] and [13, 14, 15, 16, 17] after two padded turns, the second with a hole."""
    cache = make(device, **arguments)
    numbers = torch.arange(20, device=device).view(2, 10)
    valid = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]], device=device) > 0
    append(cache, torch.where(valid, numbers[:, :5] - 3, -1000), valid)
    valid = torch.tensor([[0, 1, 0, 0], [1, 0, 1, 1]], device=device) > 0
    append(cache, torch.where(valid, torch.tensor([[9, 2, 9, 9], [12, 9, 13, 14]], device=device), -1000), valid)
    return cache


FILLED = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0, 13.0, 14.0]]


class CacheMachine(RuleBasedStateMachine):
    """Columns per sequence: a number where there is a token, None for padding."""

    @initialize(batch=st.integers(1, 3), fp8_keys=st.booleans())
    def start(self, batch, fp8_keys):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cache, self.columns, self.next = make(self.device, batch, fp8_keys=fp8_keys), [[] for _ in range(batch)], 1
        self.cropped = False

    def rows(self):
        return [[n for n in columns if n is not None] for columns in self.columns]

    @rule(data=st.data(), tokens=st.integers(1, 5))
    def append(self, data, tokens):
        batch = len(self.columns)
        bits = data.draw(st.lists(st.booleans(), min_size=batch * tokens, max_size=batch * tokens), label="valid")
        valid = torch.tensor(bits).view(batch, tokens)
        numbers = torch.arange(self.next, self.next + batch * tokens).view(batch, tokens)
        self.next += batch * tokens
        poisoned = numbers.float().masked_fill(~valid, float("nan"))
        longest = max(len(row) + int(n) for row, n in zip(self.rows(), valid.sum(1)))
        if longest > CAPACITY:
            with pytest.raises(CacheCapacityError, match=f"holds {CAPACITY} tokens.*this call needs {longest};"):
                append(self.cache, poisoned, valid.to(self.device))
            return
        append(self.cache, poisoned, valid.to(self.device))
        self.cropped &= not valid.any(1).all()
        for columns, row, kept in zip(self.columns, numbers.tolist(), valid.tolist()):
            columns += [n if k else None for n, k in zip(row, kept)]

    @rule(removed=st.integers(0, 9))
    def crop(self, removed):
        self.cache.crop(-removed)
        self.cropped = removed < len(self.columns[0]) and (self.cropped or removed > 0)
        self.columns = [columns[: max(len(columns) - removed, 0)] for columns in self.columns]

    @rule(kept=st.integers(1, 9))
    def crop_to(self, kept):
        self.cropped |= len(self.columns[0]) > kept
        self.cache.crop(kept)
        self.columns = [columns[:kept] for columns in self.columns]

    @rule(data=st.data())
    def reorder(self, data):
        batch = len(self.columns)
        order = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        before = addresses(self.cache)
        self.cache.reorder_cache(torch.tensor(order, device=self.device))
        self.columns = [list(self.columns[i]) for i in order]
        assert before == addresses(self.cache)

    @rule(data=st.data())
    def select(self, data):
        chosen = data.draw(st.lists(st.integers(0, len(self.columns) - 1), min_size=1, max_size=3))
        self.cache.batch_select_indices(torch.tensor(chosen, device=self.device))
        self.columns = [list(self.columns[i]) for i in chosen]

    @rule()
    def repeat(self):
        if len(self.columns) <= 2:
            self.cache.batch_repeat_interleave(2)
            self.columns = [list(columns) for columns in self.columns for _ in range(2)]

    @rule()
    def reset(self):
        self.cache.reset()
        self.columns, self.cropped = [[] for _ in self.columns], False

    @rule()
    def offload_and_prefetch(self):
        for layer in self.cache.layers:
            layer.offload()
            layer.prefetch()

    @rule(how=st.sampled_from([copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]))
    def duplicate(self, how):
        self.cache = how(self.cache)

    @invariant()
    def holds_what_was_appended(self):
        assert stored(self.cache) == self.rows()
        assert self.cache.batch_size == len(self.columns)
        assert self.cache.get_seq_length() == len(self.columns[0])
        assert self.cache.lengths.seen.tolist() == [[n is not None for n in row] for row in self.columns]
        assert max(map(len, self.rows())) <= self.cache.lengths.bound
        assert self.cache.lengths.current is not self.cropped


TestCacheMachine = CacheMachine.TestCase


def test_two_padded_turns_with_holes_leave_no_gap(device):
    cache = filled(device)
    assert stored(cache) == FILLED
    assert cache.get_seq_length() == 9
    assert cache.get_mask_sizes(4, 0) == (13, 0)
    assert not cache.layers[0].latent[0, 3:].any()
    assert not cache.layers[0].index_keys[1, 5:].any()


def test_slots_and_visible_follow_the_stored_tokens(device):
    valid = torch.tensor([[0, 1, 1], [1, 0, 1]], device=device) > 0
    slots, visible = slots_and_visible(valid, torch.tensor([4, 0], device=device))
    assert slots.tolist() == [[-1, 4, 5], [0, -1, 1]]
    assert visible.tolist() == [[[[0, 0], [0, 5], [0, 6]]], [[[0, 1], [0, 0], [0, 2]]]]
    assert (slots.dtype, visible.dtype) == (torch.int64, torch.int32)


def test_append_crop_and_append_is_append(device):
    cache, plain = filled(device), filled(device)
    numbers, valid = torch.full((2, 3), 7.0), torch.ones(2, 3, dtype=torch.bool, device=device)
    append(cache, numbers + 50, valid)
    cache.crop(-3)
    append(cache, numbers, valid)
    append(plain, numbers, valid)
    assert stored(cache) == stored(plain)
    assert torch.equal(cache.layers[0].latent, plain.layers[0].latent)


def test_too_many_tokens_change_nothing_and_name_the_way_out(device):
    cache = filled(device, capacity=7)
    before = copy.deepcopy(cache)
    with pytest.raises(CacheCapacityError) as caught:
        append(cache, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool, device=device))
    assert str(caught.value) == (
        "DSACache holds 7 tokens a sequence, 5 are filled, and this call needs 8; nothing was written. Ask for more "
        "with model.make_cache(batch_size, capacity=8) or CacheConfig(capacity=8)."
    )
    assert stored(cache) == stored(before)
    assert torch.equal(cache.lengths.seen, before.lengths.seen)
    append(cache, torch.full((2, 2), 99.0), torch.ones(2, 2, dtype=torch.bool, device=device))
    assert stored(cache)[1] == [*FILLED[1], 99.0, 99.0]


def test_padding_takes_no_capacity(device):
    cache, padding = make(device, capacity=3), torch.zeros(2, 50, dtype=torch.bool, device=device)
    padding[:, -3:] = True
    append(cache, torch.ones(2, 50), padding)
    assert stored(cache) == [[1.0] * 3] * 2


def test_a_write_outside_a_call_is_refused(device):
    cache = make(device)
    with pytest.raises(CacheError, match=r"written inside a call of a model that dsa_compile\.optimize or prepare"):
        cache.update(torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1, 2), 0)


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"capacity": 0}])
def test_empty_caches_are_refused(device, sizes):
    with pytest.raises(CacheError, match="expected batch_size and capacity from 1 on, came"):
        make(device, **sizes)


def test_bytes_of_a_deepseek_v32_token(device):
    plain = LayerDims(**{**vars(V32), "indexer": None})
    cache = DSACache((V32, plain), batch_size=1, capacity=4, dtype=torch.bfloat16, device=device)
    assert cache.bytes_per_token() == [1408, 1152]
    assert cache.nbytes() == 4 * (1408 + 1152)
    assert V32.expanded_values_per_token() * 2 == 81_920
    for formats, bytes_per_token in (
        ({"fp8": True}, [656 + 256, 656]),
        ({"fp8_keys": True}, [1152 + 132, 1152]),
        ({"fp8": True, "fp8_keys": True}, [788, 656]),
    ):
        cache = DSACache((V32, plain), batch_size=1, capacity=4, dtype=torch.bfloat16, device=device, **formats)
        assert cache.bytes_per_token() == bytes_per_token
        assert cache.nbytes() == 4 * sum(bytes_per_token)
        assert (cache.fp8, cache.fp8_keys) == ("fp8" in formats, "fp8_keys" in formats)
        assert cache.layers[1].index_scales is None


@pytest.mark.parametrize("fp8_keys", [False, True])
def test_an_offloaded_layer_is_on_the_cpu_and_comes_back(device, fp8_keys):
    cache = filled(device, fp8_keys=fp8_keys)
    for layer in cache.layers:
        layer.offload()
        assert {pool.device.type for pool in layer.pools().values()} == {"cpu"}
    cache.reorder_cache(torch.tensor([1, 0], device=device))
    cache.batch_select_indices(torch.tensor([0, 1], device=device))
    for layer in cache.layers:
        layer.prefetch()
        assert {pool.device.type for pool in layer.pools().values()} == {device.type}
    assert stored(cache) == FILLED[::-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [None, 5, 40])
@pytest.mark.parametrize("fp8_keys", [False, True])
def test_save_and_load(device, tmp_path, dtype, capacity, fp8_keys):
    cache = filled(device, dtype=dtype, fp8_keys=fp8_keys)
    cache.fingerprint = "owner"
    cache.save(tmp_path / "cache")
    loaded = DSACache.load(tmp_path / "cache", capacity=capacity, device=device)
    assert stored(loaded) == FILLED
    assert (loaded.capacity, loaded.dtype, loaded.dims) == (capacity or CAPACITY, dtype, DIMS)
    assert (loaded.fingerprint, loaded.get_seq_length(), loaded.fp8_keys) == ("owner", 9, fp8_keys)
    assert torch.equal(loaded.lengths.seen, cache.lengths.seen)
    with pytest.raises(CacheCapacityError, match="5 are filled"):
        loaded.plan(torch.ones(2, loaded.capacity - 4, dtype=torch.bool, device=device))
    loaded.reorder_cache(torch.tensor([1, 0], device=device))
    assert stored(loaded) == FILLED[::-1]
    loaded.reorder_cache(torch.tensor([1, 0], device=device))
    if capacity == 40:
        for each in (cache, loaded):
            append(each, torch.full((2, 2), 3.0), torch.ones(2, 2, dtype=torch.bool, device=device))
        assert stored(loaded) == stored(cache)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_an_empty_cache_is_saved_too(device, tmp_path):
    make(device).save(tmp_path / "cache")
    loaded = DSACache.load(tmp_path / "cache", device=device)
    assert (stored(loaded), loaded.capacity, loaded.fingerprint) == ([[], []], CAPACITY, None)


def test_loading_into_too_small_a_cache_is_refused(device, tmp_path):
    filled(device).save(tmp_path / "cache")
    with pytest.raises(CacheCapacityError, match="holds 5 tokens a sequence, capacity=4 cannot take them"):
        DSACache.load(tmp_path / "cache", capacity=4)


def test_foreign_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(CacheError, match=r"written by DSACache\.save, came format 'pt'"):
        DSACache.load(tmp_path / "model.safetensors")
    for name in ("text", "absent"):
        with pytest.raises(CacheError, match=f"{name}: cannot be read as a safetensors file"):
            DSACache.load(tmp_path / name)


def test_a_failed_save_leaves_the_old_file(device, tmp_path, monkeypatch):
    filled(device).save(tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()

    def half(tensors, path, metadata):
        path.write_bytes(before[:40])
        raise OSError("disk full")

    monkeypatch.setattr("dsa_compile.cache.save_file", half)
    with pytest.raises(OSError, match="disk full"):
        make(device).save(tmp_path / "cache")
    assert (tmp_path / "cache").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_lives_its_own_life(device, how):
    cache = filled(device)
    twin = how(cache)
    append(twin, torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool, device=device))
    assert stored(cache) == FILLED
    assert [len(row) for row in stored(twin)] == [4, 6]
    assert all(layer.lengths is twin.lengths for layer in twin.layers)


FP8_DIMS = LayerDims(**{**vars(INDEXED), "kv_lora_rank": 4})
"""The smallest layer with latents and index keys in fp8."""


def filled_in_fp8(device, fp8_keys):
    """Sequences [0, 1, 2] and [10, 11, 12] in one layer, all of them e4m3 values."""
    sizes = {"batch_size": 2, "capacity": CAPACITY, "dtype": torch.bfloat16, "device": device}
    cache = DSACache((FP8_DIMS,), **sizes, fp8=True, fp8_keys=fp8_keys)
    valid = torch.ones(2, 3, dtype=torch.bool, device=device)
    cache.lengths.slots, _ = cache.plan(valid)
    rows = torch.tensor([[0, 1, 2], [10, 11, 12]], device=device).bfloat16()[:, None, :, None]
    cache.update(rows.expand(-1, -1, -1, 4), rows.expand(-1, -1, -1, 2), 0)
    cache.update_indexer(rows[:, 0].expand(-1, -1, 16), 0)
    cache.lengths.slots = None
    cache.commit(valid)
    return cache


def read_in_fp8(cache):
    layer = cache.layers[0]
    values, keys = unpack(layer.latent, 4, 2, cache.dtype), layer.index_keys
    if cache.fp8_keys:
        keys = (decode(keys, torch.float32) * layer.index_scales.unsqueeze(-1)).to(cache.dtype)
    for rows in (values, keys):
        assert torch.equal(rows, values[..., :1].expand_as(rows))
    return [values[b, :n, 0].tolist() for b, n in enumerate(cache.lengths.valid.tolist())]


@pytest.mark.parametrize("fp8_keys", [False, True])
def test_everything_is_done_to_pools_in_fp8_too(device, tmp_path, fp8_keys):
    cache = filled_in_fp8(device, fp8_keys)
    assert (cache.dtype, cache.fp8, cache.layers[0].latent.dtype) == (torch.bfloat16, True, torch.uint8)
    assert read_in_fp8(cache) == [[0, 1, 2], [10, 11, 12]]
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    cache.reorder_cache(torch.tensor([1, 0], device=device))
    cache.save(tmp_path / "cache")
    loaded = DSACache.load(tmp_path / "cache", capacity=5, device=device)
    assert (loaded.dtype, loaded.fp8, loaded.fp8_keys) == (torch.bfloat16, True, fp8_keys)
    assert loaded.bytes_per_token() == [4 + 4 + 4 + (16 + 4 if fp8_keys else 32)]
    for name, pool in cache.layers[0].pools().items():
        assert torch.equal(loaded.layers[0].pools()[name][:, :3], pool[:, :3])
    for twin in (cache, loaded, copy.deepcopy(cache)):
        assert read_in_fp8(twin) == [[10, 11, 12], [0, 1, 2]]
        twin.crop(-1)
        twin.batch_repeat_interleave(2)
        twin.batch_select_indices(torch.tensor([3, 0], device=device))
        assert [row[:2] for row in read_in_fp8(twin)] == [[0, 1], [10, 11]]
        twin.reset()
        assert not any(pool.any() for pool in twin.layers[0].pools().values())


def resaved_as(path, version, lacking):
    """Make a file that `save` wrote one of an older format, which lacks some metadata; returns those."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    assert metadata["format"] == "dsa_compile.cache.v4"
    gone = {name: metadata.pop(name) for name in lacking}
    save_file(tensors, path, metadata | {"format": f"dsa_compile.cache.{version}"})
    return gone


def test_files_of_the_format_before_fp8_are_read(device, tmp_path):
    filled(device).save(tmp_path / "cache")
    gone = resaved_as(tmp_path / "cache", "v1", ["latents", "index_keys"])
    assert gone == {"latents": "", "index_keys": ""}
    loaded = DSACache.load(tmp_path / "cache", device=device)
    assert (stored(loaded), loaded.fp8, loaded.fp8_keys) == (FILLED, False, False)


def test_files_of_the_format_before_index_keys_in_fp8_are_read(device, tmp_path):
    filled_in_fp8(device, fp8_keys=False).save(tmp_path / "cache")
    assert resaved_as(tmp_path / "cache", "v2", ["index_keys"]) == {"index_keys": ""}
    loaded = DSACache.load(tmp_path / "cache", device=device)
    assert (read_in_fp8(loaded), loaded.fp8, loaded.fp8_keys) == ([[0, 1, 2], [10, 11, 12]], True, False)


def test_files_of_the_format_before_kept_selections_are_read(device, tmp_path):
    filled_in_fp8(device, fp8_keys=True).save(tmp_path / "cache")
    resaved_as(tmp_path / "cache", "v3", [])
    assert DSACache.load(tmp_path / "cache", device=device).fp8_keys


@pytest.mark.parametrize("cropped", [False, True])
def test_a_selection_that_is_of_no_last_token_is_not_saved(device, tmp_path, cropped):
    cache = filled(device)
    cache.crop(-cropped)
    cache.save(tmp_path / "cache")
    loaded = DSACache.load(tmp_path / "cache", device=device)
    assert loaded.lengths.current is not cropped
    assert stored(loaded) == stored(cache)


def test_sizes_without_fp8_rows_are_refused(device):
    with pytest.raises(
        CacheError, match=r"multiple of 4 and an even qk_rope_head_dim, came 3 and 2\. Leave CacheConfig"
    ):
        DSACache(DIMS, batch_size=2, capacity=4, dtype=torch.bfloat16, device=device, fp8=True)
    odd = LayerDims(**{**vars(PLAIN), "indexer": IndexerDims(n_heads=2, head_dim=24)})
    with pytest.raises(
        CacheError, match=r"index_head_dim that is a multiple of 16, came 24\. Leave CacheConfig\(index_"
    ):
        DSACache((odd,), batch_size=2, capacity=4, dtype=torch.bfloat16, device=device, fp8_keys=True)


def test_a_gpu_without_e4m3_is_refused(monkeypatch):
    for capability in ((8, 0), (8, 6), (7, 5)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, came=capability: came)
        with pytest.raises(CacheError, match=rf"8\.9 or more, came {capability[0]}\.{capability[1]} \(cuda:0\)"):
            check_fp8_device(torch.device("cuda", 0))
        check_fp8_device(torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    check_fp8_device(torch.device("cuda", 0))
    asked = []
    monkeypatch.setattr("dsa_compile.cache.check_fp8_device", asked.append)
    for formats in ({}, {"fp8": True}, {"fp8_keys": True}):
        DSACache((FP8_DIMS,), batch_size=1, capacity=4, dtype=torch.float32, **formats)
    assert asked == [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("held", "columns", "reach"), [(0, 5, 16), (11, 5, 16), (12, 5, 32), (20, 25, 48), (40, 9, 49), (45, 9, 50)]
)
def test_a_call_reaches_what_it_may_see_in_steps_but_for_the_last(held, columns, reach):
    """A pool of 50 slots is read whole only where it may be full."""
    cache = DSACache(DIMS, batch_size=1, capacity=50, dtype=torch.float32)
    cache.lengths.bound = held
    assert cache.reach(columns) == reach
