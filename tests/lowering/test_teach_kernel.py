"""The Triton kernels of teaching on a GPU: every shape and dtype, hostile data, and bits that never change."""

import pytest
import torch
import torch.nn.functional as F

from dsa_compile.divergence import taught_attention
from dsa_compile.lowering.mla.reference import expand_keys
from dsa_compile.lowering.select.reference import select
from dsa_compile.lowering.teach import launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
CUDA = torch.device("cuda")
NAN = float("nan")
NAMES = "out", "loss", "q", "weights", "keys"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case:
    """Inputs of one call: sequence 0 holds a document from slot 70 on, the last sequence 9 rows that see nothing."""

    def __init__(
        self, B=2, T=300, H=4, N=128, P=64, V=128, HI=8, DI=64, K=None, R=64, *, dtype=BF16, seed=0, temperature=1.0
    ):
        generator = torch.Generator(CUDA).manual_seed(seed)

        def normal(*shape, kind=dtype):
            return torch.randn(shape, generator=generator, device=CUDA).to(kind)

        self.N, self.scale, self.index_scale, self.temperature = N, (N + P) ** -0.5, DI**-0.5, temperature
        self.q = normal(B, T, H, N + P).transpose(1, 2)
        self.latent = [normal(B, T, R), normal(B, T, P), normal(H * (N + V), R) * R**-0.5]
        self.visible = torch.stack([torch.zeros(T), torch.arange(1, T + 1)], -1).int().repeat(B, 1, 1, 1).to(CUDA)
        self.visible[0, 0, 70:, 0] = 70
        self.visible[-1, 0, :, 1] = (self.visible[-1, 0, :, 1] - 9).clamp_min(0)
        student = (
            normal(B, T, HI, DI),
            normal(B, T, HI, kind=torch.promote_types(dtype, FP32)) * HI**-0.5,
            normal(B, T, DI),
        )
        self.student = [x.requires_grad_() for x in student]
        self.topk = None
        if K is not None:
            self.topk = select(*(x.detach() for x in student), self.visible, None, K, self.index_scale, 1 << 28)

    def run(self, gain=1.0):
        """Attention, loss, and gradients of ``gain`` times the loss."""
        scales = self.N, self.scale, self.index_scale, self.temperature
        out, loss = taught_attention(self.q, *self.latent, self.visible, self.topk, *self.student, *scales)
        return [out, loss, *torch.autograd.grad(loss * gain, self.student)]

    def naive(self, dtype):
        """The same as everyday torch code in ``dtype``."""
        q, *latent = (x.to(dtype) for x in (self.q, *self.latent))
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.student]
        key, value = (x.to(dtype) for x in expand_keys(q, *latent, self.N))
        slots = torch.arange(q.shape[2], device=CUDA)
        keep = (slots >= self.visible[:, 0, :, :1]) & (slots < self.visible[:, 0, :, 1:])
        if self.topk is not None:
            keep = keep & (slots[:, None] == self.topk[:, :, None]).any(-1)
        seen = keep.any(-1, keepdim=True)
        hidden = torch.where(seen, ~keep, False)
        p = (q @ key.mT * self.scale).masked_fill(hidden[:, None], -torch.inf).softmax(-1) * seen[:, None]
        iq, iw, ik = leaves
        scores = (iw.unsqueeze(-2) @ ((iq @ ik.mT.unsqueeze(1)) * self.index_scale).relu()).squeeze(-2)
        log_probs = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(~keep, 0)
        goal = (p ** (1 / self.temperature)).sum(1)
        goal = goal / goal.sum(-1, keepdim=True).where(seen, 1)
        loss = F.kl_div(log_probs, goal, reduction="sum") / seen.sum()
        return [(p @ value).transpose(1, 2), loss, *torch.autograd.grad(loss, leaves)]

    def check(self, most=1.1):
        """Errors against float64 within ``most`` times those of everyday code, which sums float32 in shorter blocks."""
        rounding = 16 * torch.finfo(self.q.dtype).eps if self.q.dtype.itemsize >= 4 else 0
        results = zip(
            ("out", "loss", "q", "weights", "keys"), self.run(), self.naive(self.q.dtype), self.naive(torch.float64)
        )
        for name, ours, eager, exact in results:
            error, allowed = (((x.double() - exact).norm() / exact.norm()).item() for x in (ours, eager))
            assert error <= most * allowed + rounding, f"{name}: {error} where everyday code errs by {allowed}"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("K", [None, 17])
@pytest.mark.parametrize("T", [16, 128, 300])
def test_any_length_and_selection_errs_no_more_than_everyday_code(T, K, dtype):
    Case(T=T, K=K, dtype=dtype).check()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {"N": 32, "P": 32, "V": 64, "HI": 16},
        {"N": 192, "V": 256},
        {"N": 16, "P": 8, "V": 24, "HI": 1, "DI": 16},
        {"N": 80, "P": 48, "V": 72, "HI": 22, "DI": 48, "H": 3},
        {"HI": 64, "DI": 128, "H": 2},
        {"HI": 128, "DI": 128, "H": 1, "T": 150},
        {"temperature": 2.0},
        {"temperature": 1.5, "K": 17},
    ],
    ids=str,
)
def test_any_sizes_err_no_more_than_everyday_code(sizes, dtype):
    Case(**sizes, dtype=dtype).check()


def test_tf32_errs_no_more_than_tf32_of_everyday_code(allow_tf32):
    allow_tf32(True)
    Case(dtype=FP32).check(most=2)  # of p and of gradients Triton cuts the bits that cuBLAS rounds


@pytest.mark.parametrize("K", [None, 17])
def test_chunks_of_rows_change_no_more_than_the_order_of_sums(K, monkeypatch):
    case = Case(B=3, T=400, K=K, dtype=FP32)
    whole = case.run()
    monkeypatch.setattr(launch, "BUDGET", 8 * 400 * 130)
    for name, part, all_at_once in zip(NAMES, case.run(), whole):
        assert torch.equal(part, all_at_once) or name in ("loss", "keys")
        torch.testing.assert_close(part, all_at_once, rtol=1e-5, atol=1e-8)


def test_every_run_gives_the_same_bits():
    case = Case(T=900, HI=64, DI=128)
    first = case.run()
    for _ in range(20):
        assert all(map(torch.equal, case.run(), first))


def test_rows_that_see_nothing_give_zeros():
    case = Case()
    out, loss, *grads = case.run()
    assert loss.isfinite()
    for x in (out, *grads[:2]):
        assert (x[-1, :9] == 0).all()
    assert (grads[2][-1, -9:] == 0).all()


def test_nan_reaches_the_loss_where_a_row_sees_it_and_nothing_where_none_does():
    case = Case()
    plain = case.run()
    for x in (*case.latent[:2], case.student[2].data):
        kept = x[-1, 299].clone()
        x[-1, 299] = NAN  # nobody sees the last slots of this sequence
        assert all(map(torch.equal, case.run(), plain))
        x[-1, 299] = kept
    for x in (case.q.transpose(1, 2), *case.latent[:2], *(x.data for x in case.student)):
        kept = x[0, 100].clone()
        x[0, 100] = NAN
        assert case.run()[1].isnan()
        x[0, 100] = kept


def test_float16_gradients_of_a_scaled_loss_keep_their_precision():
    case = Case(T=1000, dtype=FP16)
    exact, ours = case.naive(torch.float64)[2:], case.run(gain=2.0**16)[2:]
    for grad, wanted in zip(ours, exact):
        assert (grad.double() / 2**16 - wanted).norm() <= 2e-3 * wanted.norm()


def test_autocast_changes_nothing():
    case = Case(dtype=FP32)
    with torch.autocast("cuda", torch.bfloat16):
        inside = case.run()
    assert all(map(torch.equal, inside, case.run()))


def test_keys_of_another_dtype_are_multiplied_in_that_of_the_queries():
    case = Case()
    plain = case.run()
    case.student[2] = case.student[2].detach().float().requires_grad_()
    mixed = case.run()
    assert mixed[4].dtype == FP32
    assert torch.equal(mixed[1], plain[1])
    torch.testing.assert_close(plain[4].float(), mixed[4], rtol=2**-7, atol=0)  # rounded to bfloat16 twice


def test_what_no_kernel_serves_is_served_by_the_reference_which_says_so():
    case = Case(T=40, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"as its reference, not as Triton kernels: they compute in float32 at most"):
        case.check(most=2)


def test_a_layer_of_deepseek_v3_at_4096_tokens_adds_less_than_a_gibibyte():
    case = Case(B=1, T=4096, H=128, HI=64, DI=128, R=512)
    case.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.run()
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
