"""DeepSeek Sparse Attention for Hugging Face MLA models, as passes over the graph that torch.compile captures."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_compile.api import optimize, prepare
    from dsa_compile.cache import DSACache
    from dsa_compile.config import CacheConfig, DSAConfig, MTPConfig
    from dsa_compile.distillation import warmup
    from dsa_compile.evaluation import evaluate
    from dsa_compile.explanation import explain
    from dsa_compile.export import save_checkpoint
    from dsa_compile.haystack import NeedleSuite
    from dsa_compile.report import recent_reports
    from dsa_compile.search import search_plan

__version__ = "0.1.0"

_HOMES = {
    "optimize": "api",
    "prepare": "api",
    "explain": "explanation",
    "search_plan": "search",
    "evaluate": "evaluation",
    "NeedleSuite": "haystack",
    "warmup": "distillation",
    "save_checkpoint": "export",
    "DSAConfig": "config",
    "CacheConfig": "config",
    "MTPConfig": "config",
    "DSACache": "cache",
    "recent_reports": "report",
}

__all__ = [
    "CacheConfig",
    "DSACache",
    "DSAConfig",
    "MTPConfig",
    "NeedleSuite",
    "evaluate",
    "explain",
    "optimize",
    "prepare",
    "recent_reports",
    "save_checkpoint",
    "search_plan",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"dsa_compile.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dsa_compile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
