"""Texts as rows of tokens, and the loss that a model has on them where a selection leaves something out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsa_compile.errors import ConfigError, InputError
from dsa_compile.lowering.rows import compute_dtype

TOKENS_PER_K = 4
"""Tokens of a row where nobody says how many, as a multiple of K: three rows in four then leave something out."""
SEPARATOR = "<|endoftext|>"
"""Between the documents of a file."""


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Contents of files; a folder stands for the files in it, by name.

    Raises:
        ConfigError: a path is neither, or a file is no UTF-8 text.
    """
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read as text ({error}).") from error
    return texts


def documents_in(texts: Sequence[str]) -> list[str]:
    """The documents of texts that hold several with `SEPARATOR` in between; blank ones are left out."""
    return [document for text in texts for document in text.split(SEPARATOR) if document.strip()]


def plain_tokens(tokenizer: Any, text: str) -> Tensor:
    """Tokens int64[T] of a piece of text, with nothing in front of it or behind."""
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int64)


def encode(tokenizer: Any, text: str) -> Tensor:
    """Tokens int64[T] of a text, behind the bos token that DeepSeek-family prompts start with."""
    ids = tokenizer(text).input_ids
    if tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    return torch.tensor(ids, dtype=torch.int64)


def token_rows(texts: Sequence[str | Tensor], tokenizer: Any, tokens: int | None, index_topk: int) -> list[Tensor]:
    """The first ``tokens`` tokens (None: `TOKENS_PER_K` * K) of each text, int64[T].

    Args:
        texts: strings, which need the ``tokenizer``, or tokens int64[T].

    Raises:
        ConfigError: ``tokens`` leaves no row past K with a token behind it.
        InputError: there is no text, a text is that short, or strings have no tokenizer.
    """
    tokens, least = TOKENS_PER_K * index_topk if tokens is None else tokens, index_topk + 2
    if tokens < least:
        raise ConfigError(
            f"tokens: expected at least K + 2 = {least}, since below K nothing is left out; came {tokens}."
        )
    if not texts:
        raise InputError("texts: expected at least one, came none.")
    if tokenizer is None and any(isinstance(text, str) for text in texts):
        raise InputError("texts: strings need tokenizer=; or give tokens, int64[T] each.")
    rows = [(encode(tokenizer, text) if isinstance(text, str) else text)[:tokens] for text in texts]
    for place, row in enumerate(rows):
        if row.dim() != 1 or len(row) < least:
            raise InputError(
                f"texts: text {place} of {len(rows)}: expected at least K + 2 = {least} tokens, as a query that sees "
                f"no more than K attends to them all under any plan; came {tuple(row.shape)}. Give longer texts, or a "
                "smaller index_topk."
            )
    return rows


def packed_rows(texts: Sequence[str], tokenizer: Any, tokens: int, *, isolate: bool = False) -> list[dict[str, Tensor]]:
    """Documents behind one another, each between bos and eos, in rows of ``tokens``; the rest behind the last is left.

    Args:
        isolate: number the tokens of each document, and of what a row begins with, from 0 on: other documents of the
            row are not seen. Otherwise a row is one text, as in most pretraining.

    Returns:
        For each row ``input_ids`` int64[tokens], and ``position_ids`` int64[tokens] of isolated documents.

    Raises:
        InputError: the documents together are shorter than a row.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = [torch.cat([encode(tokenizer, text), torch.tensor(end, dtype=torch.int64)]) for text in texts]
    total = sum(map(len, documents))
    if total < tokens:
        raise InputError(f"texts: expected at least one row of {tokens} tokens, came {total} in all. Give more text.")
    rows = torch.cat(documents)[: total // tokens * tokens].split(tokens)
    if not isolate:
        return [{"input_ids": row} for row in rows]
    first = torch.cat([torch.arange(len(document)) == 0 for document in documents]).split(tokens)
    return [{"input_ids": row, "position_ids": _positions(begins)} for row, begins in zip(rows, first)]


def _positions(begins: Tensor) -> Tensor:
    """Distance of each place to the last one before it that ``begins``, or to the first place."""
    places = torch.arange(len(begins))
    return places - torch.where(begins, places, 0).cummax(0).values


def loss_past_k(logits: Tensor, ids: Tensor, index_topk: int) -> tuple[float, int]:
    """Sum, and count, of the next-token losses of the rows that see more than K tokens.

    Args:
        logits: [T, vocab] of ids int64[T].
    """
    rows, wanted = logits[index_topk:-1], ids[index_topk + 1 :].to(logits.device)
    losses = F.cross_entropy(rows.to(compute_dtype(rows)), wanted, reduction="none")
    return losses.sum(dtype=torch.float64).item(), len(wanted)
