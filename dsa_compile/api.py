"""`prepare` and `optimize`."""

from typing import Any, TypeVar

from torch import nn

from dsa_compile import backend
from dsa_compile.config import DSAConfig
from dsa_compile.guard import Guard
from dsa_compile.models.preparation import prepare_modules
from dsa_compile.passes.pipeline import check_names

Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model, config: DSAConfig | None = None, **fields: Any) -> Model:
    """Make a Hugging Face MLA model rewritable, in place, without compiling it.

    Its attention keeps latents, its indexer is attached, `generate` uses a `DSACache`. Run eagerly, an attached
    selection has no effect yet: the backend ``"dsa"`` inserts it (``model.compile(backend="dsa")``, or without a
    cache ``torch.compile(model, backend="dsa")``).

    Args:
        model: a causal language model of a supported family (`dsa_compile.models.family.FAMILIES`), on one device.
        config: options; ``fields`` replace single ones.

    Returns:
        The same object.

    Raises:
        ConfigError: an option is unknown or out of range, or the model is prepared already.
        UnsupportedModelError: the model has no MLA known here, or quantised weights.
        IndexerWeightsError: indexer weights are missing, do not fit or hold NaN. The model is as before.
        CheckpointError: ``indexer`` names no readable checkpoint.
    """
    options = DSAConfig.of(config, **fields)
    check_names(options.disable_passes)
    prepare_modules(model, options)
    guard = Guard(model)
    model.dsa_guard = guard  # type: ignore[assignment]
    model._compiled_call_impl = guard
    return model


def optimize(model: Model, config: DSAConfig | None = None, **fields: Any) -> Model:
    """Give a Hugging Face MLA model sparse attention over a latent cache, compiled as one graph, in place.

    ``model(...)`` and ``model.generate(...)`` then run the rewritten graph. Arguments, return value and errors are
    those of `prepare`; compilation happens at the first call.
    """
    options = DSAConfig.of(config, **fields)
    prepare(model, options)
    preparation: Any = model.dsa
    model.compile(backend=backend.dsa_backend, options=preparation.graph_options())
    return model
