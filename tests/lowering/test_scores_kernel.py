"""The score kernel of ``dsa::select`` without a GPU: how a call is cut, what is refused, what compiles."""

import hopper
import pytest
import torch

from dsa_compile.lowering.device import Device
from dsa_compile.lowering.select import configs, launch
from dsa_compile.lowering.select.configs import Call

H200 = Device((9, 0), 132, hopper.SHARED)
V32 = Call(torch.bfloat16, torch.uint8, 64, 128, 1, 1, 32768, False)


def call(**changes):
    return Call(**{**vars(V32), **changes})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "torch.float64"),
        ({"keys_dtype": torch.float32}, "keys in torch.float32"),
        ({"masked": True}, "mask"),
        ({"heads": 129}, "index_n_heads <= 128"),
        ({"dim": 144}, "index_head_dim <= 128"),
        ({}, None),
    ],
)
def test_refusals_name_the_limit(change, reason):
    refused = configs.refusal(call(**change), H200)
    assert refused is None if reason is None else reason in refused


def test_codes_want_a_gpu_that_multiplies_them():
    assert "8.0" in configs.refusal(V32, Device((8, 0), 108, 166912))
    assert configs.refusal(call(keys_dtype=torch.bfloat16), Device((8, 0), 108, 166912)) is None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("most", [4, 7, 1000])
def test_chunks_cover_every_row_once_and_no_more_than_fit(batch, rows, queries, most):
    one = call(batch=batch, queries=rows)
    parts = list(launch.chunks(one, queries, most))
    assert [r for part, _ in parts for r in range(part.start, part.stop)] == list(range(batch * rows))
    assert [b for _, blocks in parts for b in blocks] == list(range(batch * -(-rows // queries)))
    assert all(part.stop - part.start <= max(most, queries) for part, _ in parts)


@pytest.mark.parametrize(("most", "queries"), [(1000, 2), (3, 2), (1, 1)])
def test_a_program_takes_no_more_rows_than_fit(most, queries):
    one = call(queries=4096)
    assert configs.config(one, H200).queries(one, most) == queries


@pytest.mark.parametrize(
    ("batch", "queries", "slots", "parts"),
    [(1, 1, 32768, 256), (1, 1, 131072, 264), (8, 1, 32768, 33), (128, 1, 32768, 2), (1, 4096, 8192, 1)],
)
def test_keys_are_dealt_out_until_the_device_is_full(batch, queries, slots, parts):
    one = call(batch=batch, queries=queries, slots=slots)
    config = configs.config(one, H200)
    blocks = batch * -(-queries // config.queries(one, 1 << 20))
    assert configs.splits(blocks, one, config, H200) == parts


def compile_for(one, folder, page=0, dependent=False):
    from dsa_compile.lowering.select import scores_kernel

    config = configs.config(one, H200)
    sizes = config.constants(one, config.queries(one, 1 << 20)) | {"PAGE": page, "FAR": False, "EARLY": page == 0}
    sizes["DEPENDENT"] = dependent
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in sizes}
    values = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*fp8e4nv"}
    pointers = {"Q": values[one.dtype], "KEYS": values[one.keys_dtype], "WEIGHTS": "*fp32", "KEY_SCALES": "*fp32"}
    pointers |= {"VISIBLE": "*i32", "TABLE": "*i32", "OUT": "*fp32"}
    return hopper.compiled_kernel(scores_kernel.score, pointers, sizes, folder, **options)


@pytest.mark.parametrize("keys", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize(("queries", "slots"), [(1, 32768), (2, 32768), (4096, 8192), (4096, 131072)])
def test_measured_configurations_spill_nothing_and_use_tensor_cores(keys, queries, slots, tmp_path):
    made = compile_for(call(keys_dtype=keys, queries=queries, slots=slots), tmp_path)
    assert made.stack == 0
    assert made.shared <= hopper.SHARED
    assert ("e4m3.e4m3" if keys == torch.uint8 else "bf16.bf16") in made.ptx
    assert "wgmma.mma_async" in made.ptx
    assert made.ptx.index("prefetch.global.L2") < made.ptx.index("wgmma.mma_async")


def test_a_dependent_launch_reads_nothing_before_it_has_waited(tmp_path):
    hopper.waits_first(compile_for(call(keys_dtype=torch.uint8), tmp_path, dependent=True))


@pytest.mark.parametrize(
    ("change", "page"),
    [
        ({"heads": 1, "dim": 16}, 0),
        ({"heads": 22, "dim": 48, "queries": 3}, 61),
        ({"heads": 128, "queries": 5}, 1),
        ({"heads": 8, "dim": 64, "keys_dtype": torch.float16, "dtype": torch.float16}, 64),
        ({"heads": 5, "dim": 32, "keys_dtype": torch.float32, "dtype": torch.float32, "queries": 7}, 0),
    ],
    ids=str,
)
def test_other_calls_compile(change, page, tmp_path):
    assert compile_for(call(**change), tmp_path, page).shared <= hopper.SHARED


PROGRAM = """
import torch
from dsa_compile import lowering
from dsa_compile.lowering.fp8_keys import quantise
from dsa_compile.lowering.select import configs, launch
from dsa_compile.lowering.select.reference import index_scores

B, S = 2, 50
torch.manual_seed(0)
for HI, DI, T, K, columns, fp8, page, dtype in [
    (4, 32, 3, 8, 16, False, 0, torch.float32),
    (5, 16, 1, 0, 16, False, 7, torch.float32),
    (22, 48, 3, 8, 64, True, 0, torch.bfloat16),  # of integers: the interpreter rounds to e4m3 in a way of its own
    (8, 64, 2, 8, 16, True, 16, torch.float32),
]:
    q, weights = torch.randint(-4, 5, (B, T, HI, DI)).to(dtype), torch.randn(B, T, HI)
    keys, scales, table = torch.randn(B, S, DI).to(dtype), None, None
    keys[0, 4] = float("nan")
    if fp8:
        keys, scales = quantise(keys)
    ranges = torch.tensor([[0, S], [3, S - 9], [5, 9]]).int()[:T].repeat(B, 1)
    exact = index_scores(q.double(), weights.double(), keys if fp8 else keys.double(), 0.3, scales).flatten(0, 1)
    if page:
        pages = -(-S // page)
        table = torch.randperm(B * pages).view(B, pages).int()

        def paged(x):
            pool = x.new_full((B * pages, page, *x.shape[2:]), 255 if x.dtype == torch.uint8 else float("nan"))
            for b in range(B):
                for p in range(pages):
                    part = x[b, p * page : (p + 1) * page]
                    pool[table[b, p], : len(part)] = part
            return pool

        keys, scales = paged(keys), None if scales is None else paged(scales)
    call = launch.call_of(q, keys, None, table)
    config = configs.Config(columns, 16, 4, 1)
    queries = config.queries(call, B * T)
    for rows, blocks in launch.chunks(call, queries, 3):
        memory = torch.full((rows.stop - rows.start, S + 6), 7.25)
        constants = config.constants(call, queries)
        options = {"first_row": rows.start, "blocks": blocks, "splits": 2, "constants": constants}
        launch.score(memory[:, :S], q, weights, keys, ranges, K, 0.3, table, scales, **options)
        for row, written in enumerate(memory, rows.start):
            start, end = ranges[row].tolist()
            seen = torch.zeros(S + 6, dtype=torch.bool)
            seen[start:end] = end - start > K
            assert (written[~seen] == 7.25).all()
            expected = exact[row][seen[:S]]
            torch.testing.assert_close(written[seen].double(), expected, atol=1e-4, rtol=0, equal_nan=True)
    print("right")
"""


def test_the_kernel_writes_what_is_visible_and_nothing_else(tmp_path):
    assert hopper.interpreted(PROGRAM, tmp_path).count("right") == 4
