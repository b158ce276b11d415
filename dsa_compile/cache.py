"""`DSACache`: latent rows and index keys of every layer, compact, preallocated, with a length per sequence."""

import copy
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dsa_compile import compat
from dsa_compile.dims import IndexerDims, LayerDims
from dsa_compile.errors import CacheCapacityError, CacheError
from dsa_compile.lowering.fp8_keys import WIDTH_STEP
from dsa_compile.lowering.fp8_rows import row_bytes

_FORMAT = "dsa_compile.cache.v4"
_READABLE = (_FORMAT, "dsa_compile.cache.v3", "dsa_compile.cache.v2", "dsa_compile.cache.v1")
"""v3 is v4 without kept selections and the tensor ``state``: no layer was an MTP layer. v2 lacks the key ``index_keys``
too: no index key was in fp8; v1 lacks ``latents`` as well: no pool was."""


REACH_STEP = 16
"""What is read of a pool is a multiple of so many slots: kernels are compiled for sizes of few kinds."""


class Lengths:
    """What the layers of one cache share: how long each sequence is, and where the tokens of the running call go.

    Attributes:
        valid: int64[B] on the device, tokens stored per sequence.
        seen: bool[B, n] on the device, which of the n padded columns so far held a token.
        slots: int64[B, T] of the running call, -1 for padding; None outside a call.
        reach: [n, 0]: what the tokens of the running call see lies in the first n slots, a number of the host's, which
            a graph takes as a size. None where a graph is for one size of pool alone, as those of decoding are.
        state: [B, hidden], what the MTP layer's next row holds of each sequence: the state behind the model's norm of
            its last token, zeros where that is not known (no token yet, or the last ones were removed). None without
            an MTP layer.
        next_state: what ``state`` becomes if the running call goes through.
    """

    def __init__(self, batch_size: int, device: torch.device, state: Tensor | None) -> None:
        self.state = state
        self.next_state: Tensor | None = None
        self.valid = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.seen = torch.zeros(batch_size, 0, dtype=torch.bool, device=device)
        self.slots: Tensor | None = None
        self.reach: Tensor | None = None
        self.bound = 0
        """Host-side upper bound of ``valid``."""
        self.current = True
        """Whether the selections that layers keep are of the last token of every sequence that has one."""

    @property
    def padded(self) -> int:
        return self.seen.shape[1]

    def map_rows(self, rows: Tensor) -> None:
        """Make sequence i what sequence ``rows[i]`` was."""
        self.valid, self.seen = self.valid[rows], self.seen[rows]
        self.state = None if self.state is None else self.state[rows]

    def drop(self, columns: int) -> None:
        """Forget the last ``columns`` padded columns."""
        keep = max(self.padded - columns, 0)
        self.current = keep == 0 or (self.current and keep == self.padded)
        removed = self.seen[:, keep:].sum(1)
        self.valid, self.seen = self.valid - removed, self.seen[:, :keep]
        if self.state is not None:
            self.state = self.state.masked_fill(removed[:, None] > 0, 0)


class DSACacheLayer(CacheLayerMixin):
    """The pools of one layer: ``latent`` [B, S, R+P] and ``index_keys`` [B, S, DI] (DI = 0 without an indexer).

    With ``fp8`` latents are rows uint8[B, S, bytes] of `dsa_compile.lowering.fp8_rows`. With ``fp8_keys`` index keys
    are uint8 codes of `dsa_compile.lowering.fp8_keys`, and ``index_scales`` float32[B, S], else None, lies beside them.
    ``dtype`` is the model's still. ``kept`` int32[B, K], else None: where ``LayerDims.kept_topk`` says so, the
    selection of each sequence's last token.
    """

    is_compileable = False  # generate must hand the 2-D mask to the guard as it is, and leave compiling to it
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        dims: LayerDims,
        lengths: Lengths,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool,
        fp8_keys: bool,
    ) -> None:
        super().__init__()
        self.dims, self.lengths, self.dtype, self.device = dims, lengths, dtype, device
        index_width = dims.indexer.head_dim if dims.indexer else 0
        if fp8_keys and index_width % WIDTH_STEP:
            raise CacheError(
                f"fp8 index keys: expected an index_head_dim that is a multiple of {WIDTH_STEP}, came {index_width}. "
                "Leave CacheConfig(index_dtype=...) out: this model's cache can hold its own dtype."
            )
        fp8_keys = fp8_keys and index_width > 0

        def pool(*width: int, dtype: torch.dtype) -> Tensor:
            return compat.fixed_address(
                torch.zeros(lengths.valid.shape[0], capacity, *width, dtype=dtype, device=device)
            )

        width = row_bytes(dims.kv_lora_rank, dims.qk_rope_head_dim) if fp8 else dims.latent_width
        self.latent = pool(width, dtype=torch.uint8 if fp8 else dtype)
        self.index_keys = pool(index_width, dtype=torch.uint8 if fp8_keys else dtype)
        self.index_scales = pool(dtype=torch.float32) if fp8_keys else None
        kept = self.latent.new_zeros(self.batch_size, dims.kept_topk, dtype=torch.int32)
        self.kept = compat.fixed_address(kept) if dims.kept_topk else None
        self.is_initialized = True

    def first(self, lengths: Lengths) -> Self:
        """The same memory for as many of its first sequences as ``lengths`` has."""
        part = copy.copy(self)
        part.lengths = lengths
        part._replace(lambda pool: pool[: lengths.valid.shape[0]])
        return part

    def pools(self) -> dict[str, Tensor]:
        """The pools that there are, by the name of their attribute; slots are their second dimension."""
        found = {name: getattr(self, name) for name in ("latent", "index_keys", "index_scales")}
        return {name: pool for name, pool in found.items() if pool is not None}

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for name, pool in self.pools().items():
            setattr(self, name, compat.fixed_address(change(pool)))
        if self.kept is not None:
            self.kept = compat.fixed_address(change(self.kept))

    @property
    def batch_size(self) -> int:
        return self.latent.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise CacheError("DSACache layers are allocated when the cache is made.")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append latents ``[B, 1, T, R]`` and rope keys ``[B, 1, T, P]``; returns twice what of their pool is seen."""
        self._write(key_states[:, 0], value_states[:, 0], None)
        if self.kept is not None:
            torch.ops.dsa.keep_selection.default(self.kept, self.slots(), None, self.lengths.current)
        latent = self._seen(self.latent)
        return latent, latent

    def update_indexer(self, index_key: Tensor) -> tuple[Tensor, Tensor | None]:
        """Append index keys ``[B, T, DI]``; returns their pool, and that of their scales if they are in fp8."""
        self._write(None, None, index_key)
        return self._seen(self.index_keys), None if self.index_scales is None else self._seen(self.index_scales)

    def _seen(self, pool: Tensor) -> Tensor:
        """The slots of a pool that tokens of the running call may see."""
        return pool if self.lengths.reach is None else pool[:, : self.lengths.reach.shape[0]]

    def _write(self, c_kv: Tensor | None, k_pe: Tensor | None, index_key: Tensor | None) -> None:
        torch.ops.dsa.cache_write.default(
            self.latent, self.index_keys, self.slots(), c_kv, k_pe, index_key, None, self.index_scales
        )

    def slots(self) -> Tensor:
        """int64[B, T] of the running call, -1 for padding."""
        if self.lengths.slots is None:
            raise CacheError(
                "A DSACache is written inside a call of a model that dsa_compile.optimize or prepare returned; "
                "another model, or a torch.compile around the model, called it. Call the optimized model itself."
            )
        return self.lengths.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.lengths.padded + query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included: the length that transformers counts in."""
        return self.lengths.padded

    def get_max_length(self) -> int:
        """Slots per sequence."""
        return self.latent.shape[1]

    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer."""
        return sum(pool.shape[2:].numel() * pool.element_size() for pool in self.pools().values())

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        ahead = device.type != "cpu"  # a copy to the CPU that does not block may be read before it has arrived
        self._replace(lambda pool: pool.to(device, non_blocking=ahead))

    def reset(self) -> None:
        for pool in self.pools().values():
            pool.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """In place, so that the pools keep their addresses."""
        for pool in self.pools().values():
            used = pool[:, : self.lengths.bound]
            used.copy_(used.index_select(0, beam_idx.to(pool.device)))
        if self.kept is not None:
            self.kept.copy_(self.kept.index_select(0, beam_idx.to(self.kept.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: rows behind a sequence's length are never visible."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda pool: pool.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        indices = indices.to(self.latent.device)
        self._replace(lambda pool: pool[indices])


class DSACache(Cache):
    """Latent cache of an optimized model; `generate` makes one by itself.

    A token takes (R + P + DI) values a layer that owns an indexer, R + P elsewhere, in fp8 little more than a byte a
    value. Padding takes none. The pools of a layer always change together; everything a transformers ``Cache`` does
    (crop, beam search, reset, batch selection) works on all of them.

    Args:
        dims: sizes of each layer.
        batch_size: sequences.
        capacity: slots per sequence; more tokens are a `CacheCapacityError`.
        dtype, device: of the model, and of the pools.
        fp8: keep latents in fp8 instead of ``dtype``. fp8_keys: the same for index keys.
        mtp_width: hidden size of the model, if the last of ``dims`` is its MTP layer. That layer's rows are those of
            the tokens from the second on: row i is of tokens i and i + 1.
        fingerprint: the model that owns it; None until a model first writes to it.

    Raises:
        CacheError: ``batch_size`` or ``capacity`` is below 1, or sizes or device have no fp8.
    """

    layers: list[DSACacheLayer]  # type: ignore[assignment]

    def __init__(
        self,
        dims: Sequence[LayerDims],
        *,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        fp8: bool = False,
        fp8_keys: bool = False,
        mtp_width: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        if batch_size < 1 or capacity < 1:
            raise CacheError(f"DSACache: expected batch_size and capacity from 1 on, came {batch_size}, {capacity}.")
        device = torch.empty(0, device=device).device  # names the index, as tensors do
        if fp8 or fp8_keys:
            check_fp8_device(device)
        state = None if mtp_width is None else torch.zeros(batch_size, mtp_width, dtype=dtype, device=device)
        self.lengths = Lengths(batch_size, device, state)
        self.fingerprint = fingerprint
        self.dims = tuple(dims)
        super().__init__(
            layers=[
                DSACacheLayer(d, self.lengths, capacity, dtype, device, fp8=fp8, fp8_keys=fp8_keys) for d in self.dims
            ]
        )

    def first(self, batch_size: int) -> Self:
        """A cache of the first sequences in the same memory, with lengths of its own and no token yet."""
        part = copy.copy(self)
        state = None if self.lengths.state is None else torch.zeros_like(self.lengths.state[:batch_size])
        part.lengths = Lengths(batch_size, self.device, state)
        part.layers = [layer.first(part.lengths) for layer in self.layers]
        return part

    @property
    def capacity(self) -> int:
        """Slots per sequence."""
        return self.layers[0].latent.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the model, which is not that of a pool in fp8."""
        return self.layers[0].dtype

    @property
    def fp8(self) -> bool:
        """Whether latents are kept in fp8."""
        return self.layers[0].latent.dtype == torch.uint8

    @property
    def fp8_keys(self) -> bool:
        """Whether index keys are kept in fp8."""
        return any(layer.index_scales is not None for layer in self.layers)

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    def bytes_per_token(self) -> list[int]:
        """Bytes that one token takes, layer by layer."""
        return [layer.bytes_per_token() for layer in self.layers]

    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for layer in self.layers for pool in layer.pools().values())

    def plan(self, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Where a call's tokens go and what they see.

        Args:
            valid: bool[B, T], False for padding.

        Returns:
            slots int64[B, T] (-1 for padding) and visible int32[B, 1, T, 2]. Nothing is changed.

        Raises:
            CacheCapacityError: a sequence would outgrow the capacity.
        """
        self.check_room(valid)
        return slots_and_visible(valid, self.lengths.valid)

    def reach(self, columns: int) -> int:
        """Slots among which all lie that tokens of a call of so many columns may see; no question to the device."""
        most = min(self.lengths.bound + columns, self.capacity)
        rounded = -(-most // REACH_STEP) * REACH_STEP
        return rounded if rounded < self.capacity else most  # to a graph a whole pool is another thing than a part

    def check_room(self, valid: Tensor) -> None:
        """Raise CacheCapacityError if `plan` would."""
        if self.lengths.bound + valid.shape[1] > self.capacity:
            longest = int((self.lengths.valid + valid.sum(1)).max())
            if longest > self.capacity:
                raise CacheCapacityError(
                    f"DSACache holds {self.capacity} tokens a sequence, {int(self.lengths.valid.max())} are filled, "
                    f"and this call needs {longest}; nothing was written. Ask for more with "
                    f"model.make_cache(batch_size, capacity={longest}) or CacheConfig(capacity={longest})."
                )

    def commit(self, valid: Tensor) -> None:
        """Count the tokens of a call that went through."""
        self.lengths.valid = self.lengths.valid + valid.sum(1)
        self.lengths.seen = torch.cat([self.lengths.seen, valid], 1)
        if self.lengths.next_state is not None:
            self.lengths.state, self.lengths.next_state = self.lengths.next_state.clone(), None
        bound = self.lengths.bound + valid.shape[1]
        self.lengths.bound = bound if bound <= self.capacity else int(self.lengths.valid.max())
        if not self.lengths.current and any(d.kept_topk for d in self.dims):  # the question waits for the device
            self.lengths.current = bool(valid.any(1).all())

    def reset(self) -> None:
        super().reset()
        self._forget(self.lengths.padded)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns (padding included); a positive number keeps that many."""
        columns = max(self.lengths.padded - tokens_to_remove, 0) if tokens_to_remove > 0 else -tokens_to_remove
        self._forget(columns)

    def _forget(self, columns: int) -> None:
        self.lengths.drop(columns)
        self.lengths.bound = min(self.lengths.bound, self.lengths.padded)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.lengths.map_rows(beam_idx.to(self.lengths.valid.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.batch_size, device=self.lengths.valid.device).repeat_interleave(repeats)
        super().batch_repeat_interleave(repeats)
        self.lengths.map_rows(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.lengths.map_rows(indices.to(self.lengths.valid.device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the used part to a safetensors file, whole or not at all."""
        used = int(self.lengths.valid.max()) if self.lengths.padded else 0
        tensors = {"valid": self.lengths.valid, "seen": self.lengths.seen.contiguous()}
        if self.lengths.state is not None:
            tensors["state"] = self.lengths.state
        for i, layer in enumerate(self.layers):
            tensors |= {f"layers.{i}.{name}": pool[:, :used].contiguous() for name, pool in layer.pools().items()}
            if layer.kept is not None and self.lengths.current:
                tensors[f"layers.{i}.kept"] = layer.kept
        metadata = {
            "format": _FORMAT,
            "dims": json.dumps([asdict(d) for d in self.dims]),
            "capacity": str(self.capacity),
            "dtype": str(self.dtype).removeprefix("torch."),
            "latents": "fp8" if self.fp8 else "",
            "index_keys": "fp8" if self.fp8_keys else "",
            "fingerprint": self.fingerprint or "",
        }
        path = Path(path)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            part = Path(file.name)
        try:
            save_file({name: t.cpu() for name, t in tensors.items()}, part, metadata)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, capacity: int | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Read what `save` wrote. ``capacity``: slots per sequence of the new cache; None keeps the saved one.

        Raises:
            CacheError: the file is no saved cache.
            CacheCapacityError: the saved tokens do not fit into ``capacity``.
        """
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise CacheError(f"{path}: cannot be read as a safetensors file ({error}).") from error
        if meta.get("format") not in _READABLE:
            raise CacheError(f"{path}: expected a file written by DSACache.save, came format {meta.get('format')!r}.")
        capacity = int(meta["capacity"]) if capacity is None else capacity
        used = tensors["layers.0.latent"].shape[1]
        if used > capacity:
            raise CacheCapacityError(f"{path}: holds {used} tokens a sequence, capacity={capacity} cannot take them.")
        dims = [
            LayerDims(**sizes, indexer=indexer and IndexerDims(**indexer))
            for indexer, sizes in ((d.pop("indexer"), d) for d in json.loads(meta["dims"]))
        ]
        cache = cls(
            dims,
            batch_size=tensors["valid"].shape[0],
            capacity=capacity,
            dtype=getattr(torch, meta["dtype"]),
            device=device,
            fp8=meta.get("latents") == "fp8",
            fp8_keys=meta.get("index_keys") == "fp8",
            mtp_width=tensors["state"].shape[1] if "state" in tensors else None,
            fingerprint=meta["fingerprint"] or None,
        )
        for i, layer in enumerate(cache.layers):
            for name, pool in layer.pools().items():
                pool[:, :used] = tensors[f"layers.{i}.{name}"]
            if layer.kept is not None and (kept := tensors.get(f"layers.{i}.kept")) is not None:
                layer.kept.copy_(kept)
            elif layer.kept is not None:
                cache.lengths.current = False
        cache.lengths.valid.copy_(tensors["valid"])
        cache.lengths.seen = tensors["seen"].to(device)
        if cache.lengths.state is not None:
            cache.lengths.state.copy_(tensors["state"])
        cache.lengths.bound = used
        return cache


def check_fp8_device(device: torch.device) -> None:
    """Refuse a GPU without e4m3 arithmetic.

    Raises:
        CacheError: naming its compute capability.
    """
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        came = ".".join(map(str, capability))
        raise CacheError(
            f"fp8 cache: expected a GPU of compute capability 8.9 or more, came {came} ({device}). Leave "
            "CacheConfig(dtype=..., index_dtype=...) out to keep everything in the model's dtype."
        )


def slots_and_visible(valid: Tensor, stored: Tensor | None) -> tuple[Tensor, Tensor]:
    """slots int64[B, T] and causal visible int32[B, 1, T, 2] of new tokens behind ``stored`` int64[B] old ones."""
    slots = valid.long().cumsum(1) - 1
    if stored is not None:
        slots = slots + stored[:, None]
    slots = slots.masked_fill(~valid, -1)
    return slots, visible_from(slots)


def visible_from(slots: Tensor) -> Tensor:
    """Causal visible int32[B, 1, T, 2] of tokens that go to slots int64[B, T], -1 for padding."""
    end = (slots + 1).to(torch.int32)
    return torch.stack([torch.zeros_like(end), end], -1).unsqueeze(1)
