"""Other libraries as the engine: TransformerLens (`lens`) and nnsight (`nnsight`), each checked before it is believed.

Neither is needed by the rest of the package, and neither is imported before a function of its adapter is called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["lens", "nnsight"]

if TYPE_CHECKING:
    from . import lens as lens
    from . import nnsight as nnsight


def __getattr__(name: str) -> Any:
    """Import an adapter when it is first named."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")
    return importlib.import_module(f"{__name__}.{name}")
