"""Every error that a user can meet. A message says where, what was expected, what came and what to do."""


class DSAError(Exception):
    """Base of all errors of this package."""


class ConfigError(DSAError, ValueError):
    """An option is unknown or has a value that cannot work."""


class UnsupportedModelError(DSAError, TypeError):
    """The model has no Multi-head Latent Attention that this package knows."""


class IndexerWeightsError(DSAError, ValueError):
    """Indexer weights are missing, of another shape, or hold NaN."""


class MTPWeightsError(DSAError, ValueError):
    """Weights of the MTP layer are missing, of another shape or dtype, or hold NaN."""


class CheckpointError(DSAError, ValueError):
    """A checkpoint folder or file cannot be read as one."""


class InputError(DSAError, ValueError):
    """A call of an optimized model has inputs that it cannot serve."""


class CacheError(DSAError, ValueError):
    """A cache does not fit the call or the model."""


class CacheCapacityError(CacheError):
    """The tokens of a call do not fit into the cache; nothing was written."""


class TrainingError(DSAError, RuntimeError):
    """A warm-up cannot go on; its last checkpoint is whole."""


class GraphContractError(DSAError, RuntimeError):
    """A pass met, or left, a graph that breaks its contract."""
