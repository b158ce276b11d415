"""`warmup`: indexers for a model, by distillation, and the model with them (DeepSeek-V3.2 report, section 2.2)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from dsa_compile.config import DSAConfig
from dsa_compile.errors import ConfigError, InputError, TrainingError
from dsa_compile.models.preparation import trained_indexers
from dsa_compile.plan import Plan
from dsa_compile.record import read_record, write_record
from dsa_compile.student import Student

RECORD = "warm-up"
LAYERS = "layers"
"""In an entry of the log: divergences of the last batch, one for each layer that attends with an indexer."""
NEXT_TOKEN = "next_token"
"""In an entry of the log: the cross-entropy of the last batch, where the model learns too."""


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """What `warmup` trained.

    Attributes:
        indexers: tensors under DeepSeek-V3.2's names, for ``optimize(model, indexer=..., plan=...)``. Layers whose
            selection nobody reads under the plan have none. That of the MTP layer, if it was asked for, is that of the
            layer behind the last.
        plan: that they were trained for. index_topk: K of the model that they are for.
        divergences: for each layer KL(p || softmax(I)) of the batch logged last, nats per token; None where it attends
            to all, or nothing was logged. With an MTP layer its own is one more, the last.
        log: what the Trainer logged: step, loss, learning rate, divergences as `LAYERS` and, of a model that learned
            too, its own loss as `NEXT_TOKEN`.
    """

    indexers: dict[str, Tensor]
    plan: Plan
    index_topk: int
    divergences: tuple[float | None, ...]
    log: tuple[dict[str, Any], ...]


def warmup(
    model: nn.Module,
    dataset: Sequence[Mapping[str, Any]],
    arguments: TrainingArguments,
    config: DSAConfig | None = None,
    *,
    sparse: bool = False,
    train_all: bool = False,
    temperature: float = 1.0,
    retrain: bool = False,
    resume: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    **fields: Any,
) -> Warmup:
    """Train the lightning indexers of a model towards its own dense attention; the model stays as it is.

    Every indexer that the plan reads learns KL(p || softmax(I)), p the mean attention, over heads, of the layers that
    attend with it. All else is frozen, and attention is dense. Memory: no tensor has all heads, queries and keys.
    There is a second stage under sparse attention, in which the model may learn too.

    Args:
        model: a stock model of a supported family, on the device that ``arguments`` train on.
        dataset: rows with ``input_ids`` int64[T] and, if they are padded, ``attention_mask``, or if they hold several
            documents, ``position_ids`` that begin anew with each; see `dsa_compile.texts.packed_rows`.
        arguments: of transformers' Trainer: steps, batch, learning rate, precision, seed, logging, checkpoints.
        config: options as for `optimize`; ``fields`` replace single ones. Read are ``index_topk``, ``plan``,
            ``layer0``, ``index_n_heads``, ``index_head_dim``, ``indexer``: where training starts, and ``mtp``: the MTP
            layer learns too, on the states of the model and the tokens behind them; its weights are as for `optimize`.
        sparse: the second stage, for indexers that know dense attention already: layers attend to what the indexers
            select meanwhile, and p and softmax(I) are over that alone.
        train_all: in that stage ``model`` itself learns the next token as well: its parameters that have
            ``requires_grad``, float32, change where they lie. That loss has no gradient in an indexer, and KL none in
            the model; ``max_grad_norm`` is of both together. The weights of an MTP layer stay as they are. A run that
            is to be gone on with begins with the model as it was before.
        temperature: of p, in either stage; 1 is DeepSeek-V3.2's. Above 1 p is flatter, and tokens to which several
            heads attend a little count for more; see `taught_attention`.
        retrain: go on from indexers that the model, its checkpoint or ``indexer`` has.
        resume: go on from the last whole checkpoint in ``arguments.output_dir``.
        callbacks: for the Trainer.

    Raises:
        ConfigError: an option or the plan does not fit, the model has indexers, it is not to learn as it is, or the
            checkpoints are of another run.
        InputError: there is no row in which a query sees more than K tokens.
        TrainingError: a loss or a weight is not finite; the last checkpoint is from before that.
        UnsupportedModelError, IndexerWeightsError, MTPWeightsError, CheckpointError: as of `optimize`.
    """
    options = DSAConfig.of(config, **fields)
    _check_device(model, arguments)
    if train_all and (arguments.fsdp or arguments.deepspeed):
        raise ConfigError(
            "train_all: expected parameters that are trained where they lie, came fsdp or deepspeed, which shard "
            "copies of them. Start one process a GPU with torchrun, without either."
        )
    if options.indexer is None and not trained_indexers(model):
        options = DSAConfig.of(options, indexer="random")
    if options.indexer != "random" and not retrain:
        raise ConfigError(
            f"{type(model).__name__} has trained indexers (its own, of its checkpoint, or indexer=). "
            "Give retrain=True (--retrain) to go on from them, or indexer='random' to begin anew where the model "
            "brings none."
        )
    student = Student(model, options, arguments.seed, sparse=sparse, train_all=train_all, temperature=temperature)
    index_topk: int = student.model.dsa.index_topk
    _check_rows(dataset, index_topk)
    last = _checkpoint(student, dataset, arguments, resume)
    if last is not None and _is_finished(last, arguments):
        student.load_state_dict(load_file(last / SAFE_WEIGHTS_NAME))
        log = _state(last)["log_history"]
    else:
        trainer = _Trainer(student, arguments, train_dataset=dataset, callbacks=[_Finite(), *callbacks])
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        log = trainer.state.log_history
    student.write_back(model)
    found = dict(zip(student.taught, next((e[LAYERS] for e in reversed(log) if LAYERS in e), ())))
    return Warmup(
        indexers=student.weights(),
        plan=student.plan,
        index_topk=index_topk,
        divergences=tuple(found.get(layer) for layer in range(len(student.sources))),
        log=tuple(log),
    )


class _Trainer(Trainer):
    """Stops at the first loss that is no number, before it reaches a weight."""

    figures: dict[str, Any]
    _outputs: dict[str, Tensor]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.figures = {  # behind backward: the device has all its work before the host waits
            name: self._outputs[name].tolist() for name in (LAYERS, NEXT_TOKEN) if name in self._outputs
        }
        student: Any = self.model
        broken = [i for i, nats in zip(student.taught, self.figures[LAYERS]) if not math.isfinite(nats)]
        if broken:
            raise _stopped(self.state.global_step + 1, f"the divergence of layers {broken} is not", self.args)
        if not math.isfinite(self.figures.get(NEXT_TOKEN, 0.0)):
            raise _stopped(self.state.global_step + 1, "the loss of the next token is not", self.args)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = self._outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        entry: dict[str, Any] = self.state.log_history[-1]
        entry |= self.figures


class _Finite(TrainerCallback):
    """Stops behind a step that left a weight that is no number, before it is saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        student: Any = kwargs["model"]
        if torch.nn.utils.get_total_norm(student.parameters()).isfinite():
            return
        broken = [name for name, p in student.named_parameters() if not p.isfinite().all()]
        if broken:
            raise _stopped(state.global_step, f"the weights {', '.join(broken)} are not", args)


def _stopped(step: int, what: str, arguments: TrainingArguments) -> TrainingError:
    last = _last_whole(Path(str(arguments.output_dir)))
    return TrainingError(
        f"warm-up: step {step}: expected finite numbers, {what}. Lower the learning rate, or look at the rows of that "
        f"step. The last good checkpoint: {last or 'none was saved yet'}."
    )


def _check_device(model: nn.Module, arguments: TrainingArguments) -> None:
    if arguments.n_gpu > 1:
        raise ConfigError(f"warm-up in one process on {arguments.n_gpu} GPUs: start one a GPU with torchrun.")
    place, wanted = next(model.parameters()).device, torch.empty(0, device=arguments.device).device
    if place != wanted:
        raise ConfigError(
            f"warm-up: expected the model on {wanted}, where its arguments train, came {place}. Move it "
            "there, or give use_cpu=True."
        )


def _check_rows(dataset: Sequence[Mapping[str, Any]], index_topk: int) -> None:
    seen = 0
    for row in dataset:
        seen = max(seen, _visible(row))
        if seen > index_topk:
            return
    raise InputError(
        f"dataset: expected a row in which a query sees more than K = {index_topk} tokens, came {len(dataset)} rows of "
        f"at most {seen}: nothing would be sparse. Give longer texts, or a smaller index_topk."
    )


def _visible(row: Mapping[str, Any]) -> int:
    """Most tokens that a query of the row sees."""
    if "position_ids" in row:
        return int(torch.as_tensor(row["position_ids"]).max()) + 1
    if "attention_mask" in row:
        return int(torch.as_tensor(row["attention_mask"]).sum())
    return len(row["input_ids"])


def _checkpoint(student: Student, dataset: Sequence[Any], arguments: TrainingArguments, resume: bool) -> Path | None:
    """The checkpoint to go on from, of this very run; None to begin."""
    folder = Path(str(arguments.output_dir))
    of = {
        "weights": student.model.dsa.weights,
        "plan": list(student.plan.text()),
        "seed": arguments.seed,
        "rows": len(dataset),
        "sparse": student.sparse,
        "train_all": student.train_all,
        "temperature": student.temperature,
        "mtp": student.model.dsa.mtp_weights,
    }
    last = _last_whole(folder) if resume else None
    if last is not None:
        read_record(folder / "warmup.json", RECORD, of)
        return last
    if arguments.process_index == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder / "warmup.json", RECORD, of, {})
    return None


def _last_whole(folder: Path) -> Path | None:
    """The newest checkpoint whose last file, the Trainer's state, is written."""
    steps = {int(p.name.partition("-")[2]): p for p in folder.glob("checkpoint-*") if _state(p)}
    return steps[max(steps)] if steps else None


def _state(checkpoint: Path) -> dict[str, Any]:
    """What the Trainer wrote of a run up to a checkpoint; empty where it did not come to it."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return state


def _is_finished(checkpoint: Path, arguments: TrainingArguments) -> bool:
    """Whether no step is left behind a checkpoint; the Trainer itself would make one more."""
    state = _state(checkpoint)
    return bool(state["global_step"] >= (arguments.max_steps if arguments.max_steps > 0 else state["max_steps"]))
